"""The way of an Evaluate stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future

from understudy.evaluator.compute.stream import EvaluationStream
from understudy.evaluator.errors import InvalidInputError, StreamIdleError
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.types import EvaluationResult
from understudy.service.dataplane import messages
from understudy.service.dataplane.call import CallContext
from understudy.v1 import evaluation_pb2


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
    """Add every batch. While one is under way the next is read and decoded, and no more than that."""
    under_way: asyncio.Future[None] | None = None
    try:
        async for message in incoming.batches():
            batch = messages.batch(message)
            if under_way is not None:
                await under_way
            under_way = asyncio.wrap_future(stream.add(batch, call.deadline))
        if under_way is not None:
            await under_way
    finally:
        if under_way is not None:
            under_way.cancel()


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
