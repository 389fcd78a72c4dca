"""The messages of PredictionService with their codecs."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from understudy.evaluator.types import Array, Arrays, Prediction, Version
from understudy.service.calls.methods import Encoded
from understudy.service.calls.parsing import LARGE_BYTES, joined, nested, parse_zero_copy
from understudy.service.calls.status import Failure, status_message
from understudy.service.handlers import messages
from understudy.service.handlers.inference import MAX_ELEMENTS_AT_ONCE
from understudy.v1 import prediction_pb2, tensor_pb2
from understudy.wire import Contents, data_type, decode_all, encode, on_the_wire


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
        contents: See `ZeroCopyMessage`.
    """

    __slots__ = ("contents", "message")

    def __init__(self, message: prediction_pb2.PredictRequest, contents: Contents) -> None:
        self.message = message
        self.contents = contents

    @property
    def model_name(self) -> str:
        """See `PredictRequest`."""
        return self.message.model_name

    def arguments(self) -> tuple[Arrays, Version]:
        """See `PredictRequest`."""
        return decode_all(self.message.inputs, self.contents), messages.version(self.message.version)


class PredictCodec:
    """The codec of Predict."""

    def decode(self, data: bytes, begin: int = 0) -> PredictMessage:
        """See `understudy.service.calls.methods.Codec`."""
        return PredictMessage(*parse_zero_copy(prediction_pb2.PredictRequest, data, begin))

    def encode(self, response: Prediction) -> Encoded:
        """See `understudy.service.calls.methods.Codec`."""
        if is_large(response):
            return lambda: joined(pieces_of(response))
        return messages.predict_response(response).SerializeToString()


class PredictStreamCodec:
    """The codec of PredictStream."""

    def decode(self, data: bytes, begin: int = 0) -> PredictMessage:
        """See `understudy.service.calls.methods.Codec`."""
        message, contents = parse_zero_copy(prediction_pb2.PredictStreamRequest, data, begin)
        return PredictMessage(message.request, contents)

    def encode(self, response: Prediction | Failure) -> Encoded:
        """See `understudy.service.calls.methods.Codec`."""
        if isinstance(response, Failure):
            return prediction_pb2.PredictStreamResponse(error=status_message(response)).SerializeToString()
        if is_large(response):
            return lambda: joined(nested(_RESPONSE, pieces_of(response)))
        message = prediction_pb2.PredictStreamResponse(response=messages.predict_response(response))
        return message.SerializeToString()


def is_large(prediction: Prediction) -> bool:
    """Return whether a response takes long to build."""
    arrays = prediction.outputs.values()
    return sum(array.nbytes for array in arrays) > LARGE_BYTES or any(
        array.dtype.kind == "O" and array.size > MAX_ELEMENTS_AT_ONCE for array in arrays
    )


def pieces_of(prediction: Prediction) -> list[bytes | memoryview]:
    """Return the bytes of a response without copying arrays of numbers."""
    pieces: list[bytes | memoryview] = [prediction_pb2.PredictResponse(step=prediction.step).SerializeToString()]
    for name, array in prediction.outputs.items():
        key = nested(_KEY, [name.encode()])
        pieces += nested(_OUTPUTS, [*key, *nested(_VALUE, _pieces_of_tensor(name, array))])
    return pieces


def _pieces_of_tensor(name: str, array: Array) -> list[bytes | memoryview]:
    if array.dtype.kind == "O":
        return [encode(array, name=name).SerializeToString()]
    form = tensor_pb2.Tensor(dtype=data_type(array.dtype.name), shape=array.shape).SerializeToString()
    return [form, *nested(_CONTENT, [bytes_in(array)])]


def bytes_in(array: Array) -> memoryview:
    """Return the bytes of an array of numbers in row-major order, little-endian; a view of the array if they are so."""
    _, travelling = on_the_wire(array.dtype)
    return np.ascontiguousarray(array, travelling).reshape(-1).view(np.uint8).data


_KEY: Final = 1
_VALUE: Final = 2
_OUTPUTS: Final = prediction_pb2.PredictResponse.OUTPUTS_FIELD_NUMBER
_RESPONSE: Final = prediction_pb2.PredictStreamResponse.RESPONSE_FIELD_NUMBER
_CONTENT: Final = tensor_pb2.Tensor.CONTENT_FIELD_NUMBER
