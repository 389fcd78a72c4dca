"""The messages of PredictionService with their codecs, its RPCs, and streams of predictions in any protocol.

Streams are pipelined and answered in order, and the requests fail independently.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

from understudy.evaluator.types import Arrays, Prediction, Version
from understudy.service.calls.methods import CallContext
from understudy.service.calls.parsing import parse
from understudy.service.calls.status import Failure, failure_of, status_message
from understudy.service.handlers import messages
from understudy.service.served_model import Predictor, ServedModel, abandon
from understudy.v1 import prediction_pb2
from understudy.wire import decode_all


class PredictRequest(Protocol):
    """A request to predict, as its handler sees it, whatever codec decoded it."""

    @property
    def model_name(self) -> str:
        """The requested model; empty for the only one."""

    def arguments(self) -> tuple[Arrays, Version]:
        """Return the inputs by name, and the requested version.

        Raises:
            WireError: A tensor is malformed.
            InvalidInputError: The step is negative, or the label is unknown.
        """


class PredictMessage:
    """A `PredictRequest` in a message.

    Attributes:
        message: The message.
    """

    __slots__ = ("message",)

    def __init__(self, message: prediction_pb2.PredictRequest) -> None:
        self.message = message

    @property
    def model_name(self) -> str:
        """See `PredictRequest`."""
        return self.message.model_name

    def arguments(self) -> tuple[Arrays, Version]:
        """See `PredictRequest`."""
        return decode_all(self.message.inputs), messages.version(self.message.version)


class PredictCodec:
    """The codec of Predict."""

    def decode(self, data: bytes, begin: int = 0) -> PredictMessage:
        """See `understudy.service.calls.methods.Codec`."""
        return PredictMessage(parse(prediction_pb2.PredictRequest, data, begin))

    def encode(self, response: Prediction) -> bytes:
        """See `understudy.service.calls.methods.Codec`."""
        return messages.predict_response(response).SerializeToString()


class PredictStreamCodec:
    """The codec of PredictStream."""

    def decode(self, data: bytes, begin: int = 0) -> PredictMessage:
        """See `understudy.service.calls.methods.Codec`."""
        return PredictMessage(parse(prediction_pb2.PredictStreamRequest, data, begin).request)

    def encode(self, response: Prediction | Failure) -> bytes:
        """See `understudy.service.calls.methods.Codec`."""
        if isinstance(response, Failure):
            message = prediction_pb2.PredictStreamResponse(error=status_message(response))
        else:
            message = prediction_pb2.PredictStreamResponse(response=messages.predict_response(response))
        return message.SerializeToString()


class PredictionHandler:
    """Runs the model on examples. Belongs to the event loop's thread.

    Args:
        model: The served model.
        predictor: Starts predictions.
        stream_depth: The largest number of unanswered requests of one stream.
    """

    def __init__(self, model: ServedModel, predictor: Predictor, *, stream_depth: int) -> None:
        self._model = model
        self._predictor = predictor
        self._stream_depth = stream_depth

    async def predict(self, request: PredictRequest, call: CallContext) -> Prediction:
        """Predict one batch; cancel it if the caller disconnects before it reaches a device."""
        return await self._begin(request, call)

    def predict_stream(
        self, requests: AsyncIterator[PredictRequest], call: CallContext
    ) -> AsyncGenerator[Prediction | Failure, None]:
        """Predict every request of a stream; responses are in order, and a failure ends its own request only."""
        protocol = StreamProtocol[PredictRequest, None, Prediction | Failure](
            note=lambda _: None,
            begin=lambda request: self._begin_next(request, call),
            answer=lambda _, prediction: prediction,
            fail=lambda _, failure: failure,
        )
        return predict_in_order(requests, protocol, depth=self._stream_depth)

    def check_admission(self, call: CallContext) -> None:
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Evaluator.check_admission`."""
        self._model.evaluator.check_admission(call.deadline)

    def _begin_next(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self.check_admission(call)  # each message of a stream is a request
        return self._begin(request, call)

    def _begin(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self._model.check_optional_name(request.model_name)
        inputs, version = request.arguments()
        return self._predictor.begin(inputs, call, version=version, deadline=call.deadline)


_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Note = TypeVar("_Note")
_Begun = asyncio.Future[Prediction] | Failure


class StreamProtocol(Generic[_Request, _Note, _Response]):
    """Converts a protocol's messages into predictions and back.

    Args:
        note: Returns what the response needs from a request, so that the request itself can be released.
        begin: Starts a prediction; its error is the request's failure.
        answer: Builds the response; its error is the request's failure too.
        fail: Builds the response that reports a failure; never raises.
    """

    def __init__(
        self,
        *,
        note: Callable[[_Request], _Note],
        begin: Callable[[_Request], asyncio.Future[Prediction]],
        answer: Callable[[_Note, Prediction], _Response],
        fail: Callable[[_Note, Failure], _Response],
    ) -> None:
        self.note = note
        self._begin = begin
        self._answer = answer
        self._fail = fail

    def begin(self, request: _Request) -> _Begun:
        """Start a prediction, or return its failure."""
        try:
            return self._begin(request)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            return failure_of(error)

    async def response(self, note: _Note, begun: _Begun) -> _Response:
        """Wait for a prediction, and return the response for it or its failure."""
        if isinstance(begun, Failure):
            return self._fail(note, begun)
        try:
            return self._answer(note, await begun)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            return self._fail(note, failure_of(error))


async def predict_in_order(
    requests: AsyncIterator[_Request], protocol: StreamProtocol[_Request, _Note, _Response], *, depth: int
) -> AsyncGenerator[_Response, None]:
    """Answer every request in order, and read ahead while at most ``depth`` are unanswered."""
    pipeline: _Pipeline[_Note] = _Pipeline(depth)

    async def read() -> None:
        try:
            async for request in requests:
                pipeline.add(protocol.note(request), protocol.begin(request))
                if pipeline.is_full:
                    await pipeline.wait_for_room()
        finally:
            pipeline.end()

    reader = asyncio.create_task(read())
    try:
        while pipeline or await pipeline.wait_for_more():
            note, begun = pipeline.first
            yield await protocol.response(note, begun)
            pipeline.drop_first()
        await reader
    finally:
        reader.cancel()
        pipeline.cancel()


class _Pipeline(Generic[_Note]):
    """The unanswered requests of one stream, in order.

    Args:
        depth: The largest number of requests.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._begun: deque[tuple[_Note, _Begun]] = deque()
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def is_full(self) -> bool:
        return len(self._begun) >= self._depth

    @property
    def first(self) -> tuple[_Note, _Begun]:
        return self._begun[0]

    def add(self, note: _Note, begun: _Begun) -> None:
        self._begun.append((note, begun))
        self._more.set()

    def drop_first(self) -> None:
        self._begun.popleft()
        self._room.set()

    def end(self) -> None:
        """Mark the end: no more requests will be added."""
        self._ended = True
        self._more.set()

    async def wait_for_room(self) -> None:
        while self.is_full:
            self._room.clear()
            await self._room.wait()

    async def wait_for_more(self) -> bool:
        """Wait for a first request; return False if there will be none."""
        while not self._begun:
            if self._ended:
                return False
            self._more.clear()
            await self._more.wait()
        return True

    def cancel(self) -> None:
        """Cancel all unanswered requests."""
        for _, begun in self._begun:
            if isinstance(begun, asyncio.Future):
                abandon(begun)
