"""The metrics of live drift."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluation.drift_monitor import LiveDrift


class DriftMetrics(Collector):
    """Shows the latest drift: two statistics for each feature, whose number is bounded. Thread-safe.

    Args:
        registry: Where to register the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._latest: LiveDrift | None = None
        self._dropped = Counter(
            "understudy_drift_dropped_total",
            "Sampled requests that do not count for the drift, as the queue was full or they failed.",
            registry=registry,
        )
        registry.register(self)

    def computed(self, drift: LiveDrift) -> None:
        """Show a result instead of the one before."""
        self._latest = drift

    def dropped(self, reason: str) -> None:
        """Count a dropped request."""
        del reason
        self._dropped.inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the latest drift. A feature that the serving version lacks has no series."""
        latest = self._latest
        drift = GaugeMetricFamily(
            "understudy_drift",
            "Distance of live inputs, outputs and classes from the reference's: psi (Population Stability Index) or ks "
            "(Kolmogorov-Smirnov).",
            labels=["kind", "feature", "statistic"],
        )
        for each in () if latest is None else (*latest.inputs.features, *latest.scores.features):
            drift.add_metric([each.kind, each.name, "psi"], each.psi)
            if each.ks is not None:
                drift.add_metric([each.kind, each.name, "ks"], each.ks)
        yield drift
        yield GaugeMetricFamily(
            "understudy_drift_examples",
            "Live examples that the drift is computed from.",
            value=0 if latest is None else latest.examples,
        )
