"""The metrics of live drift."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from understudy.evaluator.evaluation.drift_monitor import LiveDrift


class DriftMetrics:
    """Shows the latest drift: at most the bound of features, each with two statistics. Thread-safe.

    Args:
        registry: Where to register the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drift = Gauge(
            "understudy_drift",
            "Distance of live inputs, outputs and classes from the reference's: psi (Population Stability Index) or ks "
            "(Kolmogorov-Smirnov).",
            ["kind", "feature", "statistic"],
            registry=registry,
        )
        self._examples = Gauge(
            "understudy_drift_examples", "Live examples that the drift is computed from.", registry=registry
        )
        self._dropped = Counter(
            "understudy_drift_dropped_total",
            "Sampled requests that do not count for the drift, as the queue was full or they failed.",
            registry=registry,
        )

    def computed(self, drift: LiveDrift) -> None:
        """Show a result."""
        self._examples.set(drift.examples)
        self._drift.clear()  # another version may have other outputs
        for each in (*drift.inputs.features, *drift.scores.features):
            self._drift.labels(each.kind, each.name, "psi").set(each.psi)
            if each.ks is not None:
                self._drift.labels(each.kind, each.name, "ks").set(each.ks)

    def dropped(self, reason: str) -> None:
        """Count a dropped request."""
        del reason
        self._dropped.inc()
