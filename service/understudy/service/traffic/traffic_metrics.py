"""The metrics of the request log and of live drift."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluation.drift_monitor import LiveDrift

DROP_REASONS: Final = ("queue", "error", "disk", "too_large", "redaction")


class RequestLogMetrics:
    """Counts what becomes of the sampled requests. Thread-safe.

    It is an `understudy.evaluator.records.request_log.RequestLogObserver`.

    Args:
        registry: Where to register the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._written = Counter(
            "understudy_request_log_requests_total", "Sampled requests that were written.", registry=registry
        )
        self._dropped = Counter(
            "understudy_request_log_dropped_total",
            "Sampled requests that were not written: the queue was full, the disk was full or failed, a request was "
            "larger than a file, or an input to redact was missing.",
            ["reason"],
            registry=registry,
        )
        for reason in DROP_REASONS:
            self._dropped.labels(reason)
        self._size = Gauge("understudy_request_log_bytes", "Size of the files of the request log.", registry=registry)

    def written(self, requests: int) -> None:
        """See `RequestLogObserver`."""
        self._written.inc(requests)

    def dropped(self, reason: str, requests: int = 1) -> None:
        """See `RequestLogObserver`; ``queue`` and ``error`` are the sample's reasons."""
        self._dropped.labels(reason).inc(requests)

    def size_changed(self, size: int) -> None:
        """See `RequestLogObserver`."""
        self._size.set(size)


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
