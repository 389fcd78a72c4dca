"""The messages of PredictionService with their codecs."""

from __future__ import annotations

from typing import Protocol

from understudy.evaluator.types import Arrays, Prediction, Version
from understudy.service.calls.parsing import parse
from understudy.service.calls.status import Failure, status_message
from understudy.service.handlers import messages
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
