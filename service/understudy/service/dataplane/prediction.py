"""What the RPCs of PredictionService do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.types import Prediction
from understudy.service.dataplane import messages
from understudy.service.dataplane.call import CallContext
from understudy.service.dataplane.failures import Failure, failure_of
from understudy.service.dataplane.futures import abandon
from understudy.v1 import prediction_pb2
from understudy.wire import decode_all

_Begun = asyncio.Future[Prediction] | Failure


class PredictionPlane:
    """Runs the model on rows. Belongs to the event loop's thread.

    Args:
        evaluator: Runs them.
        stream_depth: How many requests of one stream may be under way at once.
    """

    def __init__(self, evaluator: Evaluator, *, stream_depth: int) -> None:
        self._evaluator = evaluator
        self._stream_depth = stream_depth

    async def predict(
        self, request: prediction_pb2.PredictRequest, call: CallContext
    ) -> prediction_pb2.PredictResponse:
        """Predict one batch; a caller that goes away takes it back before it reaches a device."""
        return messages.predict_response(await self._begin(request, call))

    async def predict_stream(
        self, requests: AsyncIterator[prediction_pb2.PredictStreamRequest], call: CallContext
    ) -> AsyncGenerator[prediction_pb2.PredictStreamResponse, None]:
        """Predict every request of a stream; responses come in order, and a failure ends its own request only."""
        stream = _Pipeline(self._stream_depth)
        reader = asyncio.create_task(self._read(requests, call, stream))
        try:
            async for begun in stream:
                yield await _stream_response(begun)
                stream.finished_one()
            await reader
        finally:
            reader.cancel()
            stream.cancel()

    async def _read(
        self, requests: AsyncIterator[prediction_pb2.PredictStreamRequest], call: CallContext, stream: _Pipeline
    ) -> None:
        try:
            await stream.wait_for_room()
            async for message in requests:
                stream.add(self._begin_or_fail(message.request, call))
                await stream.wait_for_room()
        finally:
            stream.end()

    def _begin_or_fail(self, request: prediction_pb2.PredictRequest, call: CallContext) -> _Begun:
        try:
            return self._begin(request, call)
        except Exception as error:  # noqa: BLE001 - failure_of logs what is not expected
            return failure_of(error)

    def _begin(self, request: prediction_pb2.PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        future = self._evaluator.predict(
            decode_all(request.inputs), version=messages.version(request.version), deadline=call.deadline
        )
        return asyncio.wrap_future(future)


class _Pipeline:
    """The requests of one stream that are under way, in order, and no more of them than there is room for."""

    def __init__(self, depth: int) -> None:
        self._room = asyncio.Semaphore(depth)
        self._begun: asyncio.Queue[_Begun | None] = asyncio.Queue()

    async def wait_for_room(self) -> None:
        await self._room.acquire()

    def add(self, begun: _Begun) -> None:
        self._begun.put_nowait(begun)

    def end(self) -> None:
        self._begun.put_nowait(None)

    def finished_one(self) -> None:
        self._room.release()

    async def __aiter__(self) -> AsyncIterator[_Begun]:
        while (begun := await self._begun.get()) is not None:
            yield begun

    def cancel(self) -> None:
        """Take back everything that has not been answered."""
        while not self._begun.empty():
            begun = self._begun.get_nowait()
            if isinstance(begun, asyncio.Future):
                abandon(begun)


async def _stream_response(begun: _Begun) -> prediction_pb2.PredictStreamResponse:
    if isinstance(begun, Failure):
        return _error_response(begun)
    try:
        return prediction_pb2.PredictStreamResponse(response=messages.predict_response(await begun))
    except Exception as error:  # noqa: BLE001 - failure_of logs what is not expected
        return _error_response(failure_of(error))


def _error_response(failure: Failure) -> prediction_pb2.PredictStreamResponse:
    error = prediction_pb2.PredictError(code=failure.code, message=failure.message)
    return prediction_pb2.PredictStreamResponse(error=error)
