"""The way of an Evaluate stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from understudy.evaluator.errors import InvalidInputError, OverloadedError, StreamIdleError
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.types import Batch, EvaluationResult
from understudy.service.dataplane import messages
from understudy.service.dataplane.call import CallContext
from understudy.service.dataplane.futures import abandon
from understudy.v1 import evaluation_pb2

if TYPE_CHECKING:
    from understudy.evaluator.stream import EvaluationStream

MAX_UNDER_WAY = 2


async def score_stream(
    evaluator: Evaluator,
    requests: AsyncIterator[evaluation_pb2.EvaluateRequest],
    call: CallContext,
    *,
    executor: Executor,
    idle_seconds: float,
) -> EvaluationResult:
    """Score one version on the batches of a stream.

    Args:
        evaluator: Scores.
        requests: Options, which may be left out, then batches.
        call: The call that the stream belongs to.
        executor: Runs what blocks.
        idle_seconds: How long the stream may be silent.

    Raises:
        InvalidInputError: Options come late or twice, or there is no batch.
        StreamIdleError: The stream was silent for too long.
    """
    incoming = _Messages(requests, idle_seconds)
    options = await incoming.options()
    opening = evaluator.open_stream(
        version=messages.version(options.version),
        metrics=messages.metric_specs(options.metrics),
        deadline=call.deadline,
    )
    stream = await _opened(opening)
    try:
        await _add_all(stream, incoming, call)
        return await asyncio.get_running_loop().run_in_executor(executor, stream.finish)
    finally:
        stream.close()


class _Messages:
    """The messages of one stream, each of which must come in time."""

    def __init__(self, requests: AsyncIterator[evaluation_pb2.EvaluateRequest], idle_seconds: float) -> None:
        self._requests = requests
        self._idle_seconds = idle_seconds
        self._first_batch: evaluation_pb2.EvaluateBatch | None = None

    async def options(self) -> evaluation_pb2.EvaluateOptions:
        """Return the options if the stream begins with them, else the default ones. Call it first, and once."""
        message = await self._next()
        if message is None:
            raise InvalidInputError("the stream ended without a batch; send at least one")
        if message.WhichOneof("message") == "options":
            return message.options
        self._first_batch = _batch_of(message)
        return evaluation_pb2.EvaluateOptions()

    async def batches(self) -> AsyncIterator[evaluation_pb2.EvaluateBatch]:
        """Yield the batches."""
        if self._first_batch is not None:
            yield self._first_batch
            self._first_batch = None
        while (message := await self._next()) is not None:
            yield _batch_of(message)

    async def _next(self) -> evaluation_pb2.EvaluateRequest | None:
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await anext(self._requests, None)
        except TimeoutError:
            raise StreamIdleError(
                f"nothing came on the stream for {self._idle_seconds:g} s, and it held a slot; begin again, and send "
                "batches without such pauses"
            ) from None


async def _add_all(stream: EvaluationStream, incoming: _Messages, call: CallContext) -> None:
    """Add every batch. At most two are under way: one computes while the next is read, decoded and queued."""
    under_way: deque[asyncio.Future[None]] = deque()
    try:
        async for message in incoming.batches():
            under_way.append(await _queued(stream, messages.batch(message), call))
            if len(under_way) == MAX_UNDER_WAY:
                await under_way.popleft()
        while under_way:
            await under_way.popleft()
    finally:
        for future in under_way:
            abandon(future)


async def _queued(stream: EvaluationStream, batch: Batch, call: CallContext) -> asyncio.Future[None]:
    """Queue a batch, waiting while the queue is full: not reading on is what holds the caller back."""
    while True:
        try:
            return asyncio.wrap_future(stream.add(batch, call.deadline))
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_seconds)


async def _opened(opening: Future[EvaluationStream]) -> EvaluationStream:
    """Wait for a stream to be opened; if the caller goes away meanwhile, close it should it be opened all the same."""
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: Future[EvaluationStream]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _batch_of(message: evaluation_pb2.EvaluateRequest) -> evaluation_pb2.EvaluateBatch:
    kind = message.WhichOneof("message")
    if kind != "batch":
        came = "options came after the first message" if kind == "options" else "an empty message came"
        raise InvalidInputError(f"{came}; send options first or not at all, then batches")
    return message.batch
