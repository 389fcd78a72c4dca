"""The way of ended spans out of the process: a bounded queue, one thread, OTLP over HTTP."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter

from understudy.service.service_errors import SettingsError

CLOSE_SECONDS: Final = 5.0
"""How long the spans that wait at the end are sent for."""
LAST_EXPORT_SECONDS: Final = 12.0
"""How long the last export may take after that; one takes 10 seconds at most by default."""

_DEFAULT_QUEUE_SIZE: Final = 2048
_TRACES_PATH: Final = "/v1/traces"

_log = structlog.get_logger(__name__)


class SpanExport(SpanProcessor):
    """Sends ended spans, and counts what becomes of them. Thread-safe.

    OpenTelemetry's own processor does the work. This admits to its queue only what the queue has room for, so that each
    dropped span is counted, and bounds the time of its end.

    Args:
        registry: Where to register the metric.
        endpoint: The base URL of the receiver; by default as OTEL_EXPORTER_OTLP_* say.

    Raises:
        SettingsError: A variable of OpenTelemetry cannot be used.
    """

    def __init__(self, registry: CollectorRegistry, endpoint: str | None = None) -> None:
        counter = Counter(
            "understudy_trace_spans_total",
            "Ended spans of sampled traces (--tracing): exported, failed to export, or dropped as the queue was full.",
            ["outcome"],
            registry=registry,
        )
        self._dropped = counter.labels("dropped").inc
        try:
            self._queue_size = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or _DEFAULT_QUEUE_SIZE)
            exporter = OTLPSpanExporter(endpoint=None if endpoint is None else endpoint.rstrip("/") + _TRACES_PATH)
            self._exporter = _CountingExporter(exporter, counter)
            self._inner = BatchSpanProcessor(self._exporter, max_queue_size=self._queue_size)
        except ValueError as error:
            raise SettingsError(f"a variable of OpenTelemetry cannot be used: {error}") from error
        self._lock = threading.Lock()
        self._admitted = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See `SpanProcessor`."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or drop it if the queue is full."""
        with self._lock:
            if self._admitted - self._exporter.finished >= self._queue_size:
                self._dropped()
                return
            self._admitted += 1
        self._inner.on_end(span)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See `SpanProcessor`."""
        flushed: bool = self._inner.force_flush(timeout_millis)
        return flushed

    def shutdown(self) -> None:
        """Send what waits, and end the thread. Blocks, `CLOSE_SECONDS` and `LAST_EXPORT_SECONDS` at most."""
        self._exporter.ends_at = time.monotonic() + CLOSE_SECONDS
        closing = threading.Thread(target=self._inner.shutdown, name="understudy-tracing-end", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            self._exporter.stop_retries()
            closing.join(LAST_EXPORT_SECONDS)
        if closing.is_alive():
            _log.warning("the receiver of traces does not answer; its thread is left behind")


class _CountingExporter(SpanExporter):
    """Counts exported and failed spans, and exports nothing after a time.

    Attributes:
        finished: The spans that were exported or failed.
        ends_at: When to stop, on the `time.monotonic` clock in seconds.
    """

    def __init__(self, exporter: SpanExporter, counter: Counter) -> None:
        self._exporter = exporter
        self._count = {
            SpanExportResult.SUCCESS: counter.labels("exported").inc,
            SpanExportResult.FAILURE: counter.labels("failed").inc,
        }
        self._has_stopped = False
        self.finished = 0
        self.ends_at = float("inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        result = SpanExportResult.FAILURE
        try:
            if time.monotonic() < self.ends_at:
                result = self._exporter.export(spans)
        finally:
            self.finished += len(spans)
            self._count[result](len(spans))
        return result

    def stop_retries(self) -> None:
        """End the wait before another attempt."""
        if not self._has_stopped:
            self._has_stopped = True
            self._exporter.shutdown()

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self.stop_retries()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See `SpanExporter`."""
        flushed: bool = self._exporter.force_flush(timeout_millis)
        return flushed
