"""The trace of a call, as the service sees it, whatever records it.

A call without a trace costs one comparison. All of it belongs to the event loop's thread, but for `join_batch`, which
the batch's thread calls before the outcomes are delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from understudy.evaluator.types import Prediction
from understudy.service.calls.status import Failure


class TraceIds(NamedTuple):
    """The ids of a span, in hexadecimal digits: 32 of its trace, 16 of its own."""

    trace_id: str
    span_id: str


TRACE_IDS: ContextVar[TraceIds | None] = ContextVar("trace_ids", default=None)
"""The ids of the span of the current task's call; None if it is not traced."""


class CallTrace(Protocol):
    """Records one call."""

    @property
    def ids(self) -> TraceIds:
        """The ids of the call's span."""

    def new_future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Prediction]:
        """Return the future of a prediction of the call: a `TracedFuture` if the prediction is traced, too."""

    def end(self, failure: Failure | None, attributes: Mapping[str, str | int]) -> None:
        """End the span of the call, which succeeded if ``failure`` is None."""


@dataclass(kw_only=True, eq=False, slots=True)
class TracedBatch:
    """A batch with a prediction that is traced. Times are on the `time.monotonic` clock, in seconds.

    Attributes:
        began: When the computation began.
        ended: When the outputs were in host memory.
        fill_seconds: How long the batch was held open for more requests.
        examples: Its number of examples.
        requests: Its number of requests.
        step: The version that computed it.
        predictions: Those of its predictions that are traced.
        span: What the recorder made of it; None until a call of it has ended.
    """

    began: float
    ended: float
    fill_seconds: float
    examples: int
    requests: int
    step: int
    predictions: list[TracedPrediction] = field(default_factory=list)
    span: Any = None


@dataclass(kw_only=True, eq=False, slots=True)
class TracedPrediction:
    """A prediction of a traced call.

    Attributes:
        trace: The trace of the call.
        queue_seconds: How long it waited for its batch to be closed.
        batch: Its batch; None until that is computed.
    """

    trace: CallTrace
    queue_seconds: float = 0.0
    batch: TracedBatch | None = None


class TracedFuture(asyncio.Future[Prediction]):
    """The future of a traced prediction, by which the batch's thread finds the trace.

    Args:
        prediction: What is recorded of it. It outlives the future, which holds the outcome.
        loop: The event loop.
    """

    def __init__(self, prediction: TracedPrediction, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.prediction = prediction


def join_batch(
    futures: Sequence[object],
    *,
    queue_seconds: Sequence[float],
    fill_seconds: float,
    compute_seconds: float,
    examples: int,
    step: int,
) -> TracedBatch | None:
    """Record a batch that has just been computed on its traced predictions. Called on the batch's thread.

    Args:
        futures: The futures of all its predictions.
        queue_seconds: How long each of them waited.
        fill_seconds: How long the batch was held open.
        compute_seconds: How long it was computed.
        examples: Its number of examples.
        step: The version that computed it.

    Returns:
        The batch; None if none of its predictions is traced.
    """
    if not any(isinstance(future, TracedFuture) for future in futures):
        return None
    ended = time.monotonic()
    batch = TracedBatch(
        began=ended - compute_seconds,
        ended=ended,
        fill_seconds=fill_seconds,
        examples=examples,
        requests=len(futures),
        step=step,
    )
    for future, waited in zip(futures, queue_seconds, strict=True):
        if isinstance(future, TracedFuture):
            future.prediction.queue_seconds = waited
            future.prediction.batch = batch
            batch.predictions.append(future.prediction)
    return batch
