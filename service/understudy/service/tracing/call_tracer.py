"""Spans of calls: the call, its time in the queue, the batch and its computation, and the reply.

Only the call's own span begins with the call. The others are made when it has ended, from the times that were noted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from understudy.evaluator.types import Prediction
from understudy.service.calls.served_call import Call
from understudy.service.calls.status import Code, Failure
from understudy.service.calls.trace import TracedBatch, TracedFuture, TracedPrediction, TraceIds
from understudy.service.tracing.sampling import Sampling, starting

MOST_PREDICTIONS: Final = 128
"""How many predictions of one call are traced; a stream may have any number."""

_NEW: Final = Context()
_SERVER_ERRORS: Final = frozenset(
    {
        Code.UNKNOWN,
        Code.DEADLINE_EXCEEDED,
        Code.UNIMPLEMENTED,
        Code.INTERNAL,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    }
)
"""The codes that are errors of a server by OpenTelemetry's conventions; the others are its callers'."""


class SpanCallTracer:
    """Begins the spans of sampled calls. Belongs to the event loop's thread.

    It is an `understudy.service.calls.served_call.CallTracer`.

    Args:
        tracer: Makes the spans.
        sampling: Decides which calls are sampled.
    """

    def __init__(self, tracer: Tracer, sampling: Sampling) -> None:
        self._tracer = tracer
        self._sampling = sampling

    def begin(self, call: Call) -> SpanCallTrace | None:
        """See `CallTracer`."""
        parent = call.header("traceparent")
        if parent is None:
            trace_id = self._sampling.draw()
            if trace_id is None:
                return None
            with starting(trace_id):
                return self._start(call, _NEW)
        if isinstance(parent, str) and self._sampling.excludes_child(parent):
            return None
        return self._begin_child(call)

    def _begin_child(self, call: Call) -> SpanCallTrace | None:
        context = _PROPAGATOR.extract(call, _NEW, _HEADERS)
        if context:
            return self._start(call, context)
        trace_id = self._sampling.draw()  # the header is malformed
        if trace_id is None:
            return None
        with starting(trace_id):
            return self._start(call, _NEW)

    def _start(self, call: Call, context: Context) -> SpanCallTrace | None:
        epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            call.span_name(),
            context,
            SpanKind.SERVER,
            {**call.span_attributes(), "understudy.request_id": call.request_id},
            start_time=_ns(call.started, epoch_ns),
        )
        return SpanCallTrace(self._tracer, span, epoch_ns) if span.is_recording() else None


class _HeaderGetter(Getter[Call]):
    """Reads the headers of a call for a propagator."""

    def get(self, carrier: Call, key: str) -> list[str] | None:
        value = carrier.header(key)
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Call) -> list[str]:
        del carrier
        return []


_PROPAGATOR: Final = TraceContextTextMapPropagator()
_HEADERS: Final = _HeaderGetter()


class SpanCallTrace:
    """The spans of one call. It is an `understudy.service.calls.trace.CallTrace`.

    Args:
        tracer: Makes the spans.
        span: The call's.
        epoch_ns: The time of the epoch at 0 of the `time.monotonic` clock, in nanoseconds.

    Attributes:
        context: The context of the call's span.
        ids: Its ids.
    """

    __slots__ = ("_epoch_ns", "_predictions", "_span", "_tracer", "context", "ids")

    def __init__(self, tracer: Tracer, span: Span, epoch_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._epoch_ns = epoch_ns
        self._predictions: list[TracedPrediction] = []
        self.context: SpanContext = span.get_span_context()
        self.ids = TraceIds(trace_id=f"{self.context.trace_id:032x}", span_id=f"{self.context.span_id:016x}")

    def new_future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Prediction]:
        """See `CallTrace`."""
        if len(self._predictions) >= MOST_PREDICTIONS:
            return loop.create_future()
        prediction = TracedPrediction(trace=self)
        self._predictions.append(prediction)
        return TracedFuture(prediction, loop)

    def end(self, failure: Failure | None, attributes: Mapping[str, str | int]) -> None:
        """See `CallTrace`."""
        now = time.monotonic()
        own = set_span_in_context(self._span, _NEW)
        for prediction in self._predictions:
            if prediction.batch is not None:
                self._show_prediction(prediction, prediction.batch, own)
        if len(self._predictions) == 1 and self._predictions[0].batch is not None:
            self._show("reply", own, self._predictions[0].batch.ended, now)
        self._span.set_attributes(attributes)
        if failure is not None:
            self._span.set_attribute("error.type", failure.code.name)
            if failure.code in _SERVER_ERRORS:
                self._span.set_status(Status(StatusCode.ERROR, failure.message))
        self._span.end(_ns(now, self._epoch_ns))

    def _show_prediction(self, prediction: TracedPrediction, batch: TracedBatch, own: Context) -> None:
        """Make the spans of a prediction; that of its batch is a child of the first call of the batch."""
        self._show("queue", own, batch.began - prediction.queue_seconds, batch.began)
        if batch.span is None:
            batch.span = self._show_batch(batch)
        computed = {"understudy.step": batch.step}
        if batch.predictions[0] is prediction:
            self._show("compute", set_span_in_context(batch.span, _NEW), batch.began, batch.ended, attributes=computed)
        else:
            links = [Link(batch.span.get_span_context())]
            self._show("compute", own, batch.began, batch.ended, attributes=computed, links=links)

    def _show_batch(self, batch: TracedBatch) -> Span:
        first, *others = dict.fromkeys(_trace_of(prediction) for prediction in batch.predictions)
        return self._show(
            "batch",
            set_span_in_context(first._span, _NEW),  # noqa: SLF001 - of the same class
            batch.began - batch.fill_seconds,
            batch.ended,
            attributes={
                "understudy.step": batch.step,
                "understudy.batch.examples": batch.examples,
                "understudy.batch.requests": batch.requests,
            },
            links=[Link(each.context) for each in others],
        )

    def _show(
        self,
        name: str,
        parent: Context,
        began: float,
        ended: float,
        *,
        attributes: Mapping[str, str | int] | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        span = self._tracer.start_span(
            name, parent, attributes=attributes, links=links, start_time=_ns(began, self._epoch_ns)
        )
        span.end(_ns(ended, self._epoch_ns))
        return span


def _trace_of(prediction: TracedPrediction) -> SpanCallTrace:
    assert isinstance(prediction.trace, SpanCallTrace)  # noqa: S101 - which has made it
    return prediction.trace


def _ns(monotonic_seconds: float, epoch_ns: int) -> int:
    return int(monotonic_seconds * 1e9) + epoch_ns
