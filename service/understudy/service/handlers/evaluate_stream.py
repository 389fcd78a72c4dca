"""The implementation of an Evaluate stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.evaluator.types import Array, Batch, EvaluationResult
from understudy.service.calls.call import CallContext
from understudy.service.handlers import messages
from understudy.service.handlers.batch_stream import BatchStream, StreamLimits
from understudy.service.handlers.served_model import ServedModel
from understudy.service.predictor import abandon
from understudy.v1 import evaluation_pb2

if TYPE_CHECKING:
    from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream

MAX_UNDER_WAY = 2

Incoming = BatchStream[evaluation_pb2.EvaluateRequest]


async def score_stream(
    model: ServedModel,
    requests: AsyncIterator[evaluation_pb2.EvaluateRequest],
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
    options = evaluation_pb2.EvaluateOptions() if first is None else first.options
    model.check_optional_name(options.model_name)
    opening = model.evaluator.open_stream(
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


async def _add_all(stream: EvaluationStream, incoming: Incoming, call: CallContext) -> None:
    """Add every batch. At most two are in flight: one computes while the next is read, decoded and queued."""
    under_way: deque[asyncio.Future[Array | None]] = deque()
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


async def _queued(stream: EvaluationStream, batch: Batch, call: CallContext) -> asyncio.Future[Array | None]:
    """Queue a batch; wait while the queue is full, which applies back pressure to the caller."""
    while True:
        try:
            return asyncio.wrap_future(stream.add(batch, call.deadline))
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_seconds)


async def _opened(opening: Future[EvaluationStream]) -> EvaluationStream:
    """Wait for a stream to be opened; if the caller disconnects first, close the stream once it is open."""
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: Future[EvaluationStream]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
