from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.service.calls.methods import methods_of
from understudy.service.calls.metrics import InferenceStatistics, RpcMetrics, new_registry
from understudy.service.calls.status import Code
from understudy.service.evaluator_metrics import ServiceObserver
from understudy.service.handlers.status_handlers import exposition
from understudy.service.services import LIGHT_SERVICES, PREDICTION

PREDICT = {"grpc_type": "unary", "grpc_service": "understudy.v1.PredictionService", "grpc_method": "Predict"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry()


def observing(registry: CollectorRegistry) -> ServiceObserver:
    return ServiceObserver(registry, statistics=InferenceStatistics(), on_record=lambda: None)


@pytest.fixture
def observer(registry: CollectorRegistry) -> ServiceObserver:
    return observing(registry)


def record(sequence: int, *, step: int, outcome: EvaluationOutcome = EvaluationOutcome.SCORED) -> EvaluationRecord:
    return EvaluationRecord(
        sequence=sequence,
        step=step,
        checkpoint_digest="d",
        dataset="test",
        outcome=outcome,
        metrics={"loss": step / 100},
    )


def test_every_method_has_its_series_from_the_start(registry: CollectorRegistry) -> None:
    methods = [method for service in LIGHT_SERVICES for method in methods_of(service)]
    RpcMetrics(registry, methods)
    assert {method.path for method in methods} >= {
        "/understudy.v1.PredictionService/PredictStream",
        "/understudy.v1.EvaluationService/Evaluate",
        "/understudy.v1.ModelService/Promote",
        "/understudy.v1.MetricsService/GetMetrics",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
    samples = [sample for family in registry.collect() for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    for method in methods:
        labels = {"grpc_type": method.rpc_type, "grpc_service": method.service, "grpc_method": method.name}
        for name in ("started_total", "msg_received_total", "msg_sent_total", "handling_seconds_count"):
            assert values[f"grpc_server_{name}", frozenset(labels.items())] == 0
        for code in Code:
            labelled = {**labels, "grpc_code": code.label}
            assert values["grpc_server_handled_total", frozenset(labelled.items())] == 0


def test_kinds_of_calls_are_named_as_in_go() -> None:
    kinds = {method.name: method.rpc_type for service in LIGHT_SERVICES for method in methods_of(service)}
    assert kinds["Predict"] == "unary"
    assert kinds["Evaluate"] == "client_stream"
    assert kinds["WatchEvaluations"] == "server_stream"
    assert kinds["PredictStream"] == "bidi_stream"


def test_a_call_is_counted_and_timed(registry: CollectorRegistry) -> None:
    metrics = RpcMetrics(registry, methods_of(PREDICTION)).of("/understudy.v1.PredictionService/Predict")
    metrics.started_calls += 1
    metrics.handled(Code.NOT_FOUND, seconds=0.003)
    assert registry.get_sample_value("grpc_server_handled_total", {**PREDICT, "grpc_code": "NotFound"}) == 1
    assert registry.get_sample_value("grpc_server_handling_seconds_sum", PREDICT) == 0.003


def test_a_batch_is_measured(registry: CollectorRegistry, observer: ServiceObserver) -> None:
    observer.batch_computed(
        "predict", examples=5, queue_seconds=[0.00001, 0.2], fill_seconds=0.0, compute_seconds=0.001
    )
    value = registry.get_sample_value
    assert value("understudy_queue_seconds_count") == 2
    assert value("understudy_queue_seconds_bucket", {"le": "1e-05"}) == 1
    assert value("understudy_batch_examples_sum") == 5
    assert value("understudy_compute_seconds_sum") == 0.001
    assert value("understudy_batch_fill_seconds_count") == 1
    assert value("understudy_examples_total", {"operation": "predict"}) == 5
    assert value("understudy_examples_total", {"operation": "evaluate"}) == 0


def test_refusals_loads_and_the_queue_are_shown_from_the_start(
    registry: CollectorRegistry, observer: ServiceObserver
) -> None:
    value = registry.get_sample_value
    for reason in ("queue_full", "deadline", "unmeetable", "cancelled", "invalid", "draining"):
        assert value("understudy_rejected_total", {"reason": reason}) == 0
    observer.rejected("deadline")
    observer.queue_changed(17)
    observer.checkpoint_loaded("failed", seconds=0.5)
    observer.checkpoint_reached("scored", seconds=3)
    assert value("understudy_rejected_total", {"reason": "deadline"}) == 1
    assert value("understudy_queue_examples") == 17
    assert value("understudy_checkpoint_loads_total", {"outcome": "failed"}) == 1
    assert value("understudy_checkpoint_loads_total", {"outcome": "loaded"}) == 0
    assert value("understudy_checkpoint_load_seconds_sum") == 0.5
    assert value("understudy_checkpoint_scored_seconds_bucket", {"le": "2.5"}) == 0
    assert value("understudy_checkpoint_scored_seconds_bucket", {"le": "5.0"}) == 1
    assert value("understudy_checkpoint_served_seconds_count") == 0


def test_the_newest_score_of_a_dataset_is_shown_in_whatever_order_they_are_told(
    registry: CollectorRegistry, observer: ServiceObserver
) -> None:
    for told in (record(2, step=20), record(1, step=10), record(3, step=30, outcome=EvaluationOutcome.SKIPPED)):
        observer.evaluation_recorded(told)
    value = registry.get_sample_value
    labels = {"dataset": "test", "metric": "loss", "dataset_digest": "", "metric_digest": ""}
    assert value("understudy_evaluation_metric", labels) == 0.2
    assert value("understudy_evaluation_step", {"dataset": "test"}) == 20
    assert value("understudy_evaluations_total", {"outcome": "scored"}) == 2
    assert value("understudy_evaluations_total", {"outcome": "skipped"}) == 1
    assert value("understudy_evaluations_total", {"outcome": "undecided"}) == 0


def scores_in(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Return the values of metrics by dataset, metric, and the digests of content and configuration."""
    names = ("dataset", "metric", "dataset_digest", "metric_digest")
    return {
        tuple(sample.labels[name] for name in names): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "understudy_evaluation_metric"
    }


def test_what_cannot_be_compared_is_another_series_and_the_earlier_one_ends(
    registry: CollectorRegistry, observer: ServiceObserver
) -> None:
    first = replace(record(1, step=10), dataset_digest="c" * 64, metric_digests={"loss": "a" * 64})
    observer.evaluation_recorded(first)
    observer.evaluation_recorded(replace(record(2, step=10), dataset="other", metric_digest="e" * 64))
    other = {("other", "loss", "", "e" * 8): 0.1}
    assert scores_in(registry) == {("test", "loss", "c" * 8, "a" * 8): 0.1, **other}

    configured = replace(first, sequence=3, step=20, metrics={"loss": 0.2}, metric_digests={"loss": "b" * 64})
    observer.evaluation_recorded(configured)
    assert scores_in(registry) == {("test", "loss", "c" * 8, "b" * 8): 0.2, **other}

    observer.evaluation_recorded(replace(record(4, step=30), dataset_digest="d" * 64, metrics={"mae": 0.5}))
    assert scores_in(registry) == {("test", "mae", "d" * 8, ""): 0.5, **other}


def test_two_services_in_one_process_do_not_share_metrics() -> None:
    first, second = new_registry(), new_registry()
    observing(first).rejected("invalid")
    observing(second)
    assert second.get_sample_value("understudy_rejected_total", {"reason": "invalid"}) == 0


def test_the_exposition_can_be_parsed_and_doubles_no_series(
    registry: CollectorRegistry, observer: ServiceObserver
) -> None:
    del observer
    content, _ = exposition(registry)
    families = {family.name for family in text_string_to_metric_families(content.decode())}
    assert "understudy_queue_seconds" in families
    assert not [name for name in families if name.endswith("_created")]


def test_promtool_accepts_the_metrics(registry: CollectorRegistry, observer: ServiceObserver, promtool: Path) -> None:
    RpcMetrics(registry, [method for service in LIGHT_SERVICES for method in methods_of(service)])
    observer.evaluation_recorded(record(1, step=10))
    observer.checkpoint_reached("served", seconds=3)
    content, _ = exposition(registry)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=content, capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout.decode(), checked.stderr.decode()) == (0, "", "")


def test_decisions_of_the_gate_are_counted_and_audited(
    registry: CollectorRegistry, observer: ServiceObserver, caplog: pytest.LogCaptureFixture
) -> None:
    def decided(outcome: EvaluationOutcome) -> float | None:
        return registry.get_sample_value("understudy_gate_decisions_total", {"outcome": outcome.value})

    assert decided(EvaluationOutcome.UNDECIDED) == 0.0
    with caplog.at_level("INFO", logger="understudy.audit"):
        for sequence, outcome in enumerate([EvaluationOutcome.SCORED, EvaluationOutcome.UNDECIDED], start=1):
            observer.evaluation_recorded(replace(record(sequence, step=7, outcome=outcome), reason="too few"))

    assert decided(EvaluationOutcome.UNDECIDED) == 1.0
    assert [line for line in caplog.messages if "gate decided" in line and "undecided" in line] == caplog.messages
