"""The traces of a service, from the settings and OpenTelemetry's variables, and the spans of a checkpoint's life.

Ended spans leave the process by a bounded queue and one thread, as OTLP over HTTP.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE, OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry, Counter

from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, EvaluationRecord, LifeEvent
from understudy.service.service_errors import SettingsError
from understudy.service.tracing.call_tracer import DrawnIds, Sampling, SpanCallTracer, starting

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


REMEMBERED: Final = 1000
"""How many checkpoints are remembered: those of the latest events. A forgotten one begins another tree in its trace."""

_NEW: Final = Context()
_Attributes = Mapping[str, str | int | float]


@dataclass(kw_only=True, slots=True)
class _Life:
    """The root of a checkpoint's spans, and when the last of them ended, in nanoseconds since the epoch."""

    root: Context
    until_ns: int


class SpanCheckpointTracer:
    """Makes a span for each event, from the event before it. Thread-safe.

    It is an `understudy.service.evaluator_metrics.CheckpointTracer`.

    Args:
        tracer: Makes the spans; its sampler keeps all of them.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._lives: OrderedDict[tuple[int, str], _Life] = OrderedDict()

    def reached(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """See `CheckpointTracer`."""
        now = time.time_ns()
        with self._lock:
            life = self._life(info.key, began_ns=int(info.created_at * 1e9), ended_ns=now)
            if event is not LifeEvent.SEEN:
                self._show(event.value, life, life.until_ns, now)

    def recorded(self, record: EvaluationRecord) -> None:
        """See `CheckpointTracer`."""
        ended = int(record.recorded_at * 1e9)
        attributes: dict[str, str | int | float] = {"understudy.dataset": record.dataset} if record.dataset else {}
        attributes |= {f"understudy.metric.{name}": value for name, value in record.metrics.items()}
        if record.reason:
            attributes["understudy.reason"] = record.reason
        with self._lock:
            life = self._life((record.step, record.checkpoint_digest), began_ns=ended, ended_ns=ended)
            began = life.until_ns
            if record.outcome is EvaluationOutcome.SCORED:
                began = ended - int(record.duration_seconds * 1e9)
            failed = record.reason if record.outcome is EvaluationOutcome.FAILED else None
            self._show(record.outcome.value, life, began, ended, attributes=attributes, failed=failed)

    def _life(self, key: tuple[int, str], *, began_ns: int, ended_ns: int) -> _Life:
        """Return what is remembered of a checkpoint; make its root, from its commit until it was seen, at first."""
        life = self._lives.get(key)
        if life is None:
            step, digest = key
            with starting(trace_id_of(step, digest)):
                root = self._tracer.start_span(
                    "checkpoint",
                    _NEW,
                    attributes={"understudy.step": step, "understudy.checkpoint.digest": digest},
                    start_time=min(began_ns, ended_ns),
                )
            root.end(ended_ns)
            life = self._lives[key] = _Life(root=set_span_in_context(root, _NEW), until_ns=ended_ns)
            if len(self._lives) > REMEMBERED:
                self._lives.popitem(last=False)
        self._lives.move_to_end(key)
        return life

    def _show(
        self,
        name: str,
        life: _Life,
        began_ns: int,
        ended_ns: int,
        *,
        attributes: _Attributes | None = None,
        failed: str | None = None,
    ) -> None:
        span = self._tracer.start_span(name, life.root, attributes=attributes, start_time=min(began_ns, ended_ns))
        if failed is not None:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(ended_ns)
        life.until_ns = max(life.until_ns, ended_ns)


def trace_id_of(step: int, digest: str) -> int:
    """Return the id of the trace of a checkpoint."""
    return int.from_bytes(hashlib.sha256(f"{step} {digest}".encode()).digest()[:16], "big")


_UNNAMED: Final = "unknown_service"


class Tracing:
    """Records the traces of one service. It does not touch OpenTelemetry's global provider.

    Args:
        registry: Where to register the metric of the spans.
        share: The share of new traces to sample; see `Sampling`.
        endpoint: The base URL of the receiver; by default as OTEL_EXPORTER_OTLP_* say.

    Attributes:
        calls: Traces the calls.
        checkpoints: Traces the checkpoints, every one.

    Raises:
        SettingsError: A variable of OpenTelemetry cannot be used.
    """

    def __init__(self, registry: CollectorRegistry, *, share: float | None, endpoint: str | None) -> None:
        sampling = Sampling(share)
        self._export = SpanExport(registry, endpoint)
        self._resource = _resource()
        self.calls = SpanCallTracer(self._tracer(sampling.sampler), sampling)
        self.checkpoints = SpanCheckpointTracer(self._tracer(ALWAYS_ON))

    def close(self) -> None:
        """Send the spans that wait. Blocks for a bounded time; see `SpanExport`."""
        self._export.shutdown()

    def _tracer(self, sampler: Sampler | None) -> Tracer:
        provider = TracerProvider(
            sampler=sampler, resource=self._resource, shutdown_on_exit=False, id_generator=DrawnIds()
        )
        provider.add_span_processor(self._export)
        return provider.get_tracer("understudy", metadata.version("understudy"))


def is_disabled() -> bool:
    """Return whether OpenTelemetry's own variable turns all of it off."""
    return os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"


def _resource() -> Resource:
    """Return the resource of the environment, with a name for a service that has none."""
    found = Resource.create()
    if not str(found.attributes[SERVICE_NAME]).startswith(_UNNAMED):
        return found
    return found.merge(Resource({SERVICE_NAME: "understudy"}))
