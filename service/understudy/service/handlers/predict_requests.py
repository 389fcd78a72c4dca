"""Predict requests, as messages or as matched by a template."""

from __future__ import annotations

from typing import NamedTuple

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Arrays, Version
from understudy.service.handlers import messages
from understudy.service.handlers.request_templates import RequestTemplate, RequestTemplateCache, template_with
from understudy.v1 import prediction_pb2, tensor_pb2
from understudy.wire import WireError, decode_all


class TemplatedPredict(NamedTuple):
    """A request that `RequestTemplateCache` matched.

    Attributes:
        inputs: Every input by name.
        version: The requested version.
        model_name: The requested model; empty for the only one.
    """

    inputs: Arrays
    version: Version
    model_name: str


_MAP_VALUE = 2
_CONTENT = (prediction_pb2.PredictRequest.INPUTS_FIELD_NUMBER, _MAP_VALUE, tensor_pb2.Tensor.CONTENT_FIELD_NUMBER)
"""The path of fields to the elements in a request with one input."""

PredictRequest = prediction_pb2.PredictRequest | TemplatedPredict
PredictStreamRequest = prediction_pb2.PredictStreamRequest | TemplatedPredict


def template_cache() -> RequestTemplateCache[prediction_pb2.PredictRequest, TemplatedPredict]:
    """Return a template cache for requests with one input."""
    return RequestTemplateCache(prediction_pb2.PredictRequest.FromString, _template_of, _CONTENT)


def stream_template_cache() -> RequestTemplateCache[prediction_pb2.PredictStreamRequest, TemplatedPredict]:
    """Return a template cache for stream requests with one input."""
    return RequestTemplateCache(
        prediction_pb2.PredictStreamRequest.FromString,
        lambda message: _template_of(message.request),
        (prediction_pb2.PredictStreamRequest.REQUEST_FIELD_NUMBER, *_CONTENT),
    )


def arguments(request: PredictRequest) -> tuple[Arrays, Version]:
    """Return the inputs by name, and the requested version.

    Raises:
        WireError: A tensor is malformed.
        InvalidInputError: The step is negative, or the label is unknown.
    """
    if isinstance(request, TemplatedPredict):
        return request.inputs, request.version
    return decode_all(request.inputs), messages.version(request.version)


def streamed(message: PredictStreamRequest) -> PredictRequest:
    """Return the request in a message of a stream."""
    return message if isinstance(message, TemplatedPredict) else message.request


def _template_of(request: prediction_pb2.PredictRequest) -> RequestTemplate[TemplatedPredict] | None:
    if len(request.inputs) != 1:
        return None
    try:
        inputs, asked = arguments(request)
    except (WireError, InvalidInputError):
        return None
    ((name, array),) = inputs.items()
    model_name = request.model_name
    return template_with(
        request.inputs[name].content,
        array,
        lambda array: TemplatedPredict(inputs={name: array}, version=asked, model_name=model_name),
        others=(name, asked, model_name),
    )
