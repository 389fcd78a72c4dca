"""Requests to predict, as messages or as recognized by their bytes."""

from __future__ import annotations

from typing import NamedTuple

from understudy.evaluator.errors import InvalidInputError
from understudy.evaluator.types import Arrays, Version
from understudy.service.dataplane import messages
from understudy.service.dataplane.recognizer import Form, Recognizer, form_with
from understudy.v1 import prediction_pb2, tensor_pb2
from understudy.wire import WireError, decode_all


class RecognizedPredict(NamedTuple):
    """What a `Recognizer` makes of the bytes of a request.

    Attributes:
        inputs: Every input by name.
        version: The version asked for.
    """

    inputs: Arrays
    version: Version


_MAP_VALUE = 2
_CONTENT = (prediction_pb2.PredictRequest.INPUTS_FIELD_NUMBER, _MAP_VALUE, tensor_pb2.Tensor.CONTENT_FIELD_NUMBER)
"""The way to the elements of a request of one input."""

PredictRequest = prediction_pb2.PredictRequest | RecognizedPredict
PredictStreamRequest = prediction_pb2.PredictStreamRequest | RecognizedPredict


def recognizer() -> Recognizer[prediction_pb2.PredictRequest, RecognizedPredict]:
    """Return what recognizes requests of one input."""
    return Recognizer(prediction_pb2.PredictRequest.FromString, _form_of, _CONTENT)


def stream_recognizer() -> Recognizer[prediction_pb2.PredictStreamRequest, RecognizedPredict]:
    """Return what recognizes requests of one input on streams."""
    return Recognizer(
        prediction_pb2.PredictStreamRequest.FromString,
        lambda message: _form_of(message.request),
        (prediction_pb2.PredictStreamRequest.REQUEST_FIELD_NUMBER, *_CONTENT),
    )


def arguments(request: PredictRequest) -> tuple[Arrays, Version]:
    """Return the inputs by name, and the version asked for.

    Raises:
        WireError: A tensor is malformed.
        InvalidInputError: The step is negative, or the label is unknown.
    """
    if isinstance(request, RecognizedPredict):
        return request
    return decode_all(request.inputs), messages.version(request.version)


def streamed(message: PredictStreamRequest) -> PredictRequest:
    """Return the request that a message of a stream is."""
    return message if isinstance(message, RecognizedPredict) else message.request


def _form_of(request: prediction_pb2.PredictRequest) -> Form[RecognizedPredict] | None:
    if len(request.inputs) != 1:
        return None
    try:
        inputs, asked = arguments(request)
    except (WireError, InvalidInputError):
        return None
    ((name, array),) = inputs.items()
    return form_with(
        request.inputs[name].content,
        array,
        lambda array: RecognizedPredict(inputs={name: array}, version=asked),
        others=(name, asked),
    )
