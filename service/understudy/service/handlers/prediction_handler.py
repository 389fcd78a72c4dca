"""The messages of PredictionService with their codecs, and its RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from understudy.evaluator.types import Arrays, Prediction, Version
from understudy.service.calls.methods import CallContext
from understudy.service.calls.status import Failure, status_message
from understudy.service.handlers import messages
from understudy.service.handlers.pipeline import StreamProtocol, predict_in_order
from understudy.service.handlers.served_model import ServedModel
from understudy.service.predictor import Predictor
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
        return PredictMessage(prediction_pb2.PredictRequest.FromString(data[begin:]))

    def encode(self, response: Prediction) -> bytes:
        """See `understudy.service.calls.methods.Codec`."""
        return messages.predict_response(response).SerializeToString()


class PredictStreamCodec:
    """The codec of PredictStream."""

    def decode(self, data: bytes, begin: int = 0) -> PredictMessage:
        """See `understudy.service.calls.methods.Codec`."""
        return PredictMessage(prediction_pb2.PredictStreamRequest.FromString(data[begin:]).request)

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
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Predictor.check_admission`."""
        self._predictor.check_admission(call.deadline)

    def _begin_next(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self.check_admission(call)  # each message of a stream is a request
        return self._begin(request, call)

    def _begin(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self._model.check_optional_name(request.model_name)
        inputs, version = request.arguments()
        return self._predictor.begin(inputs, version=version, deadline=call.deadline)
