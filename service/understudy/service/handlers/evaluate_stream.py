"""Streams of batches: their limits and messages, and the implementation of Evaluate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from understudy.evaluator.evaluator_errors import InvalidInputError, OverloadedError, StreamIdleError
from understudy.evaluator.types import EvaluationResult
from understudy.service.calls.caller import Caller, Limits
from understudy.service.calls.methods import CallContext
from understudy.service.calls.parsing import ZeroCopyMessage
from understudy.service.handlers import messages
from understudy.service.served_model import ServedModel, abandon
from understudy.v1 import evaluation_pb2

if TYPE_CHECKING:
    from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream, ExampleScores
    from understudy.evaluator.evaluation.servable_stream import ServableStream

MAX_UNDER_WAY = 2
"""How many batches of one stream may be queued or computed at once."""

_RETRY_SECONDS = 1.0

Request = TypeVar(
    "Request", evaluation_pb2.EvaluateRequest, evaluation_pb2.CompareRequest, evaluation_pb2.ReplayRequest
)
Opened = TypeVar("Opened", bound="ServableStream")
_T = TypeVar("_T")


class ConcurrencyLimit:
    """Limits how many calls run at the same time, in all and of one caller. Belongs to the event loop's thread.

    Args:
        count: The most calls at once.
        what: The name of the calls in errors.
        limit_of: Returns the most at once of one caller.
    """

    def __init__(self, count: int, what: str, limit_of: Callable[[Limits], int]) -> None:
        self._count = count
        self._what = what
        self._limit_of = limit_of
        self._open = 0
        self._open_by: Counter[str] = Counter()

    @contextmanager
    def acquired(self, caller: Caller | None) -> Iterator[None]:
        """Count a call while the block runs, also for its caller if it is known.

        Raises:
            OverloadedError: As many calls as allowed are open, in all or of this caller.
        """
        if caller is not None and self._open_by[caller.name] >= self._limit_of(caller.limits):
            raise OverloadedError(
                f"{caller.name} has {self._open_by[caller.name]} {self._what} open, which is its limit; try again "
                "when one has ended",
                retry_after_seconds=_RETRY_SECONDS,
            )
        if self._open >= self._count:
            raise OverloadedError(
                f"{self._open} {self._what} are open, which is the limit; try again when one has ended",
                retry_after_seconds=_RETRY_SECONDS,
            )
        open_by = Counter() if caller is None else Counter([caller.name])
        self._open += 1
        self._open_by += open_by
        try:
            yield
        finally:
            self._open -= 1
            self._open_by -= open_by  # drops callers without a call


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """How long a stream may be idle, and how long it may last, in seconds."""

    idle_seconds: float
    total_seconds: float


class BatchStream(Generic[Request]):
    """The messages of one stream, with time limits. Read by one task at a time.

    Args:
        requests: Options or batches, in the ``oneof`` called ``message``; large ones are each a `ZeroCopyMessage`.
        limits: The limits of the stream.
    """

    def __init__(self, requests: AsyncIterator[Request | ZeroCopyMessage], limits: StreamLimits) -> None:
        self._requests: AsyncIterator[Request | ZeroCopyMessage] = requests
        self._idle_seconds = limits.idle_seconds
        self._total_seconds = limits.total_seconds
        self._ends = time.monotonic() + limits.total_seconds
        self._first_batch: ZeroCopyMessage | None = None

    async def first(self) -> Request | None:
        """Return the first message if it is options, else None. Call it first and only once.

        Raises:
            InvalidInputError: There is no message at all.
            StreamIdleError: The stream was idle for too long, or lasted too long.
        """
        request = await self._next()
        if request is None:
            raise InvalidInputError("the stream ended without a batch; send at least one")
        if request.message.WhichOneof("message") == "options":
            options: Request = request.message
            return options
        self._first_batch = _batch_of(request)
        return None

    async def next_batch(self) -> ZeroCopyMessage | None:
        """Return the message of the next batch, or None at the end.

        Raises:
            InvalidInputError: Options are not the first message, or are sent twice.
            StreamIdleError: The stream was idle for too long, or lasted too long.
        """
        if self._first_batch is not None:
            batch, self._first_batch = self._first_batch, None
            return batch
        request = await self._next()
        return None if request is None else _batch_of(request)

    async def _next(self) -> ZeroCopyMessage | None:
        left = self._ends - time.monotonic()
        try:
            async with asyncio.timeout(min(self._idle_seconds, left)):
                request = await anext(self._requests, None)
        except TimeoutError:
            if left <= self._idle_seconds:
                raise StreamIdleError(
                    f"the stream lasted longer than {self._total_seconds:g} s while it held a slot; send fewer "
                    "batches at once, or raise --stream-timeout-seconds"
                ) from None
            raise StreamIdleError(
                f"the stream was idle for {self._idle_seconds:g} s while it held a slot; start again, and send "
                "batches without such pauses"
            ) from None
        return request if request is None or isinstance(request, ZeroCopyMessage) else ZeroCopyMessage(request, {})


def _batch_of(request: ZeroCopyMessage) -> ZeroCopyMessage:
    kind = request.message.WhichOneof("message")
    if kind != "batch":
        came = "got options after the first message" if kind == "options" else "got an empty message"
        raise InvalidInputError(f"{came}; send options first or not at all, then batches")
    return ZeroCopyMessage(request.message.batch, request.contents)


Incoming = BatchStream[evaluation_pb2.EvaluateRequest]


async def score_stream(
    model: ServedModel,
    requests: AsyncIterator[evaluation_pb2.EvaluateRequest | ZeroCopyMessage],
    call: CallContext,
    *,
    executor: Executor,
    limits: StreamLimits,
) -> EvaluationResult:
    """Score one version on the batches of a stream.

    Args:
        model: The served model, whose evaluator scores the batches.
        requests: Optional options, then batches.
        call: The call that the stream belongs to.
        executor: Runs blocking calls.
        limits: The limits of the stream.

    Raises:
        UnknownModelError: The options name another model.
        InvalidInputError: Options are not the first message or are sent twice, or there is no batch.
        StreamIdleError: The stream was idle for too long, or lasted too long.
    """
    incoming: Incoming = BatchStream(requests, limits)
    first = await incoming.first()
    if first is not None:
        call.message_done()
    options = evaluation_pb2.EvaluateOptions() if first is None else first.options
    model.check_optional_name(options.model_name)
    opening = model.evaluator.open_stream(
        version=messages.version(options.version),
        metrics=messages.metric_specs(options.metrics),
        breakdown=messages.breakdown_options(options),
        deadline=call.deadline,
    )
    stream = await opened(opening)
    try:
        await _add_all(stream, incoming, call)
        return await asyncio.get_running_loop().run_in_executor(executor, stream.finish)
    finally:
        stream.close()


async def _add_all(stream: EvaluationStream, incoming: Incoming, call: CallContext) -> None:
    """Add every batch. At most two are in flight: one computes while the next is read, decoded and queued."""
    under_way: deque[asyncio.Future[ExampleScores]] = deque()
    try:
        while (future := await _next_queued(stream, incoming, call)) is not None:
            future.add_done_callback(lambda _: call.message_done())
            under_way.append(future)
            if len(under_way) == MAX_UNDER_WAY:
                await under_way.popleft()
        while under_way:
            await under_way.popleft()
    finally:
        for future in under_way:
            abandon(future)


async def _next_queued(
    stream: EvaluationStream, incoming: Incoming, call: CallContext
) -> asyncio.Future[ExampleScores] | None:
    """Queue the next batch, of which nothing is kept here; None at the end."""
    received = await incoming.next_batch()
    if received is None:
        return None
    batch = messages.batch(*received)
    return await queued(lambda: stream.add(batch, call.deadline))


async def queued(add: Callable[[], Future[_T]]) -> asyncio.Future[_T]:
    """Queue a batch; wait while the queue is full, which applies back pressure to the caller."""
    while True:
        try:
            return asyncio.wrap_future(add())
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_seconds)


async def opened(opening: Future[Opened]) -> Opened:
    """Wait for a stream to be opened; if the caller disconnects first, close the stream once it is open."""
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: Future[Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
