"""The traces of a service, from the settings and OpenTelemetry's variables, and the spans of a checkpoint's life."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry

from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, EvaluationRecord, LifeEvent
from understudy.service.tracing.call_tracer import SpanCallTracer
from understudy.service.tracing.sampling import DrawnIds, Sampling, starting
from understudy.service.tracing.span_export import SpanExport

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
