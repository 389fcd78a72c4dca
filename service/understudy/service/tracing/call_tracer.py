"""Spans of calls: the call, its time in the queue, the batch and its computation, and the reply.

Only the call's own span begins with the call. The others are made when it has ended, from the times that were noted.
OpenTelemetry decides which calls are sampled; `Sampling` says beforehand when it is sure to decide against one.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from understudy.evaluator.types import Prediction
from understudy.service.calls.served_call import Call
from understudy.service.calls.status import Code, Failure
from understudy.service.calls.trace import TracedBatch, TracedFuture, TracedPrediction, TraceIds
from understudy.service.sample_gaps import SampleGaps

DEFAULT_SHARE: Final = 0.01

_PARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]([0-9a-f])")
"""A valid ``traceparent`` of the present version; the propagator judges all others."""
_SHARES: Final = {
    "always_on": 1.0,
    "always_off": 0.0,
    "traceidratio": None,
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
    "parentbased_traceidratio": None,
}
"""The samplers of OpenTelemetry's specification: the share of new traces, which for None is OTEL_TRACES_SAMPLER_ARG."""

_TRACE_ID: ContextVar[int | None] = ContextVar("trace_id", default=None)


class Sampling:
    """The decisions about calls. An unsampled call costs a look at a header and a subtraction. Not thread-safe.

    Args:
        share: The share of new traces to sample, where a caller's own decision goes first; None for the sampler of
            OTEL_TRACES_SAMPLER, and without it for `DEFAULT_SHARE`.

    Attributes:
        sampler: The sampler for the SDK; None for the one that it finds in the environment itself.
    """

    def __init__(self, share: float | None) -> None:
        name = os.environ.get(OTEL_TRACES_SAMPLER, "").strip().lower()
        if share is None and not name:
            share = DEFAULT_SHARE
        self.sampler: Sampler | None = None
        self._heeds_parent = True
        if share is not None:
            self.sampler = ParentBased(TraceIdRatioBased(share))
        elif name in _SHARES:
            self._heeds_parent = name.startswith("parentbased")
            share = _SHARES[name]
            share = _share_of_environment() if share is None else share
        else:  # another package's: it decides on every call
            self._heeds_parent = False
            share = 1.0
        self._bound = TraceIdRatioBased.get_bound_for_rate(share)
        self._gaps = SampleGaps(share)
        self._others = self._gaps.draw()

    def excludes_child(self, parent: str) -> bool:
        """Return whether a call with this ``traceparent`` is not sampled."""
        if not self._heeds_parent:
            return False
        match = _PARENT.fullmatch(parent)
        return match is not None and not int(match[1], 16) & 1

    def draw(self) -> int | None:
        """Return the id of a new trace, for `starting`, or None if it is not sampled."""
        if self._others > 0:
            self._others -= 1
            return None
        self._others = self._gaps.draw()
        kept = random.randrange(1, max(self._bound, 2))  # noqa: S311 - an id, of those that the sampler keeps
        return random.getrandbits(64) << 64 | kept


def _share_of_environment() -> float:
    """Return the share as the SDK reads it: all if it cannot be read."""
    try:
        share = float(os.environ.get(OTEL_TRACES_SAMPLER_ARG, ""))
    except ValueError:
        return 1.0
    return share if 0 <= share <= 1 else 1.0


class DrawnIds(RandomIdGenerator):
    """Gives new traces the id of `starting`; on one that `Sampling.draw` has drawn the SDK's sampler decides again."""

    def generate_trace_id(self) -> int:
        """See `RandomIdGenerator`."""
        return _TRACE_ID.get() or super().generate_trace_id()


@contextmanager
def starting(trace_id: int) -> Iterator[None]:
    """Give the traces that begin in this block an id."""
    token = _TRACE_ID.set(trace_id)
    try:
        yield
    finally:
        _TRACE_ID.reset(token)


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
        epoch_ns = _epoch_ns()
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


def _epoch_ns() -> int:
    """Return the time of the epoch at 0 of the `time.monotonic` clock, in nanoseconds."""
    return max(time.time_ns() - time.monotonic_ns() for _ in range(3))  # a pause between the two makes it less


def _ns(monotonic_seconds: float, epoch_ns: int) -> int:
    return int(monotonic_seconds * 1e9) + epoch_ns
