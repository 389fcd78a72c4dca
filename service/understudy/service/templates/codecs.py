"""Codecs that neither parse nor build messages that differ from earlier ones in their examples only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Arrays, Prediction, Version
from understudy.oip import inference_pb2
from understudy.service.calls.methods import Codec
from understudy.service.calls.status import Failure, UnsupportedError
from understudy.service.handlers.infer_codec import (
    InferCodec,
    InferMessage,
    InferRequest,
    InferResponse,
    InferStreamCodec,
    ResponseSpec,
)
from understudy.service.handlers.inference import Inference
from understudy.service.handlers.prediction_handler import (
    PredictCodec,
    PredictMessage,
    PredictRequest,
    PredictStreamCodec,
)
from understudy.service.services import Codecs, plain_codecs
from understudy.service.templates.byte_templates import (
    RequestTemplate,
    RequestTemplateCache,
    ResponseTemplateCache,
    template_with,
)
from understudy.v1 import prediction_pb2, tensor_pb2
from understudy.wire import WireError

_Message = TypeVar("_Message")
_Request = TypeVar("_Request")

_MAP_VALUE: Final = 2
_PREDICT_CONTENT: Final = (
    prediction_pb2.PredictRequest.INPUTS_FIELD_NUMBER,
    _MAP_VALUE,
    tensor_pb2.Tensor.CONTENT_FIELD_NUMBER,
)
"""The path of fields to the elements in a request with one input."""
_STREAMED_CONTENT: Final = (prediction_pb2.PredictStreamRequest.REQUEST_FIELD_NUMBER, *_PREDICT_CONTENT)
_INFER_CONTENT: Final = (inference_pb2.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,)


def template_codecs() -> Codecs:
    """Return the codecs of the methods that predict, with empty caches. They belong to one thread."""
    plain = plain_codecs()
    predict = TemplateCodec(
        PredictCodec().decode, predict_template, _PREDICT_CONTENT, ResponseTemplateCache(plain.predict.encode).bytes_of
    )
    predict_stream = TemplateCodec(
        PredictStreamCodec().decode, predict_template, _STREAMED_CONTENT, _encode_streamed(plain.predict_stream)
    )
    infer = TemplateCodec(InferCodec().decode, infer_template, _INFER_CONTENT, _encode_inferred(plain.infer))
    infer_stream = TemplateCodec(
        InferStreamCodec().decode, infer_stream_template, _INFER_CONTENT, plain.infer_stream.encode
    )
    return Codecs(predict=predict, predict_stream=predict_stream, infer=infer, infer_stream=infer_stream)


class TemplateCodec(Generic[_Message, _Request]):
    """A codec whose requests a template cache matches first. Belongs to one thread.

    Args:
        decode: The plain codec's function.
        template_of: Returns the template of a request that was decoded plainly, or None if it has none.
        path: See `RequestTemplateCache`.
        encode: Returns the bytes of a response.

    Attributes:
        encode: Returns the bytes of a response.
    """

    def __init__(
        self,
        decode: Callable[[bytes], _Message],
        template_of: Callable[[_Message], RequestTemplate[_Request] | None],
        path: tuple[int, ...],
        encode: Callable[[Any], bytes],
    ) -> None:
        self._decode = decode
        self._cache = RequestTemplateCache(decode, template_of, path)
        self.encode = encode

    def decode(self, data: bytes, begin: int = 0) -> _Message | _Request:
        """See `understudy.service.calls.methods.Codec`."""
        matched = self._cache.match(data, begin)
        if matched is not None:
            return matched
        data = data[begin:]
        request = self._decode(data)
        self._cache.learn(data, request)
        return request


class TemplatedPredict(NamedTuple):
    """A `PredictRequest` that a template matched."""

    inputs: Arrays
    version: Version
    model_name: str

    def arguments(self) -> tuple[Arrays, Version]:
        """See `PredictRequest`."""
        return self.inputs, self.version


def predict_template(request: PredictMessage) -> RequestTemplate[TemplatedPredict] | None:
    """Return the template of a request with one input, else None."""
    message = request.message
    if len(message.inputs) != 1 or not all(tensor.content for tensor in message.inputs.values()):
        return None
    try:
        inputs, version = request.arguments()
    except (WireError, InvalidInputError):
        return None
    ((name, array),) = inputs.items()
    model_name = message.model_name
    return template_with(
        message.inputs[name].content,
        array,
        lambda array: TemplatedPredict({name: array}, version, model_name),
        others=(name, version, model_name),
    )


def _encode_streamed(plain: Codec[PredictRequest, Prediction | Failure]) -> Callable[[Prediction | Failure], bytes]:
    encode, bytes_of = plain.encode, ResponseTemplateCache(plain.encode).bytes_of

    def encode_streamed(response: Prediction | Failure) -> bytes:
        return encode(response) if isinstance(response, Failure) else bytes_of(response)

    return encode_streamed


class TemplatedSpec(ResponseSpec):
    """What the responses to all requests of one template depend on.

    Attributes:
        bytes_of: Returns the bytes of the response with these outputs.
    """

    bytes_of: Callable[[Prediction], bytes]


class TemplatedInfer(NamedTuple):
    """An `InferRequest` that a template matched."""

    model_name: str
    model_version: str
    spec: ResponseSpec
    decoded: Inference

    def forms_to_build(self) -> Mapping[str, ArrayForm] | None:
        """See `InferRequest`."""
        return None

    def inference(self) -> Inference:
        """See `InferRequest`."""
        return self.decoded


def infer_template(request: InferMessage) -> RequestTemplate[TemplatedInfer] | None:
    """Return the template of a request with one input in raw contents, whose responses share bytes; else None."""
    spec = TemplatedSpec(*request.spec)
    plain, encode = request.spec, InferCodec().encode
    spec.bytes_of = ResponseTemplateCache(lambda prediction: encode(InferResponse(plain, prediction))).bytes_of
    return _infer_template(request, spec)


def infer_stream_template(request: InferMessage) -> RequestTemplate[TemplatedInfer] | None:
    """Return the template of a request with one input in raw contents, else None."""
    return _infer_template(request, request.spec)


def _infer_template(request: InferMessage, spec: ResponseSpec) -> RequestTemplate[TemplatedInfer] | None:
    message = request.message
    if len(message.raw_input_contents) != 1 or message.id:  # ids are rarely equal
        return None
    try:
        if request.forms_to_build() is not None:
            return None
        inference = request.inference()
    except (WireError, InvalidInputError, UnsupportedError):
        return None
    model_name, inputs, version, identifier, parameters, outputs = inference
    ((name, array),) = inputs.items()

    def with_array(array: Array) -> TemplatedInfer:
        decoded = Inference(model_name, {name: array}, version, identifier, parameters, outputs)
        return TemplatedInfer(model_name, version, spec, decoded)

    others = (name, inference._replace(inputs={}), spec)
    return template_with(message.raw_input_contents[0], array, with_array, others=others)


def _encode_inferred(plain: Codec[InferRequest, InferResponse]) -> Callable[[InferResponse], bytes]:
    encode = plain.encode

    def encode_inferred(response: InferResponse) -> bytes:
        spec = response.spec
        return spec.bytes_of(response.prediction) if isinstance(spec, TemplatedSpec) else encode(response)

    return encode_inferred
