"""The metrics of live drift."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from understudy.evaluator.evaluation.drift import DriftReport, FeatureDrift, Kind
from understudy.evaluator.evaluation.drift_monitor import LiveDrift
from understudy.service.traffic.traffic_sample import DriftMetrics


def feature(name: str, kind: Kind, **values: Any) -> FeatureDrift:
    chosen = {
        "psi": 0.5,
        "psi_by_chance": 0.0,
        "ks": 0.25,
        "ks_error": 0.0,
        "reference_count": 1,
        "count": 1,
        "bins": (),
    }
    return FeatureDrift(name=name, kind=kind, **{**chosen, **values})


def live(*scores: FeatureDrift) -> LiveDrift:
    return LiveDrift(
        dataset="test",
        step=1,
        examples=7,
        computed_at=0.0,
        inputs=DriftReport(features=(feature("x[0]", "input"),)),
        scores=DriftReport(features=scores),
    )


def test_the_latest_drift_is_shown_and_no_earlier_one() -> None:
    registry = CollectorRegistry()
    metrics = DriftMetrics(registry)
    assert registry.get_sample_value("understudy_drift_examples") == 0

    metrics.computed(live(feature("y", "class", ks=None)))
    metrics.computed(live(feature("z", "score")))

    def value(kind: str, name: str, statistic: str) -> float | None:
        return registry.get_sample_value("understudy_drift", {"kind": kind, "feature": name, "statistic": statistic})

    assert registry.get_sample_value("understudy_drift_examples") == 7
    assert (value("input", "x[0]", "psi"), value("input", "x[0]", "ks")) == (0.5, 0.25)
    assert value("score", "z", "psi") == 0.5
    assert value("class", "y", "psi") is None


def test_strings_and_classes_have_no_distance() -> None:
    registry = CollectorRegistry()
    DriftMetrics(registry).computed(live(feature("y", "class", ks=None)))
    labels = {"kind": "class", "feature": "y"}
    assert registry.get_sample_value("understudy_drift", {**labels, "statistic": "psi"}) == 0.5
    assert registry.get_sample_value("understudy_drift", {**labels, "statistic": "ks"}) is None
