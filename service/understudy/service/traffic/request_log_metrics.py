"""The metrics of the request log."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

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
