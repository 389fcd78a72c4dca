"""Codecs that neither parse nor build messages that differ from earlier ones in the elements of one tensor only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Arrays, Prediction, Version
from understudy.oip import inference_pb2
from understudy.service.calls.methods import Codec, Encoded, at_once
from understudy.service.calls.parsing import LARGE_BYTES, span_of
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
from understudy.service.handlers.predict_codec import PredictCodec, PredictMessage, PredictRequest, PredictStreamCodec
from understudy.service.services import Codecs, plain_codecs
from understudy.service.templates.string_templates import StringTemplates
from understudy.v1 import prediction_pb2, tensor_pb2
from understudy.wire import WireError

_Message = TypeVar("_Message")
_Request = TypeVar("_Request")
_Message_contra = TypeVar("_Message_contra", contravariant=True)
_Request_co = TypeVar("_Request_co", covariant=True)

_REMEMBERED: Final = 512
LARGEST_BYTES: Final = LARGE_BYTES
"""Larger messages are not learned, since learning parses a message again."""

_LARGEST_AROUND_BYTES: Final = 1 << 12
"""The limit of the bytes around the elements, which the cache keeps."""

COMPLEMENT: Final = bytes(range(255, -1, -1))
"""Translates every byte into a different one."""

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
    infer = TemplateCodec[InferMessage, InferRequest](
        InferCodec().decode,
        infer_template,
        _INFER_CONTENT,
        _encode_inferred(plain.infer),
        strings=StringTemplates(_templated_spec),
    )
    infer_stream = TemplateCodec[InferMessage, InferRequest](
        InferStreamCodec().decode,
        infer_stream_template,
        _INFER_CONTENT,
        plain.infer_stream.encode,
        strings=StringTemplates(lambda request: request.spec),
    )
    return Codecs(predict=predict, predict_stream=predict_stream, infer=infer, infer_stream=infer_stream)


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


def _encode_streamed(plain: Codec[PredictRequest, Prediction | Failure]) -> Callable[[Prediction | Failure], Encoded]:
    encode, bytes_of = plain.encode, ResponseTemplateCache(plain.encode).bytes_of

    def encode_streamed(response: Prediction | Failure) -> Encoded:
        return encode(response) if isinstance(response, Failure) else bytes_of(response)

    return encode_streamed


class TemplatedSpec(ResponseSpec):
    """What the responses to all requests of one template depend on.

    Attributes:
        bytes_of: Returns the bytes of the response with these outputs.
    """

    bytes_of: Callable[[Prediction], Encoded]


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


def infer_template(request: InferMessage) -> RequestTemplate[InferRequest] | None:
    """Return the template of a request with one input in raw contents, whose responses share bytes; else None."""
    return _infer_template(request, _templated_spec(request))


def _templated_spec(request: InferMessage) -> TemplatedSpec:
    spec = TemplatedSpec(*request.spec)
    plain, encode = request.spec, InferCodec().encode
    spec.bytes_of = ResponseTemplateCache(lambda prediction: encode(InferResponse(plain, prediction))).bytes_of
    return spec


def infer_stream_template(request: InferMessage) -> RequestTemplate[InferRequest] | None:
    """Return the template of a request with one input in raw contents, else None."""
    return _infer_template(request, request.spec)


def _infer_template(request: InferMessage, spec: ResponseSpec) -> RequestTemplate[InferRequest] | None:
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

    def with_array(array: Array) -> InferRequest:
        decoded = Inference(model_name, {name: array}, version, identifier, parameters, outputs)
        return TemplatedInfer(model_name, version, spec, decoded)

    others = (name, inference._replace(inputs={}), spec)
    return template_with(message.raw_input_contents[0], array, with_array, others=others)


def _encode_inferred(plain: Codec[InferRequest, InferResponse]) -> Callable[[InferResponse], Encoded]:
    encode = plain.encode

    def encode_inferred(response: InferResponse) -> Encoded:
        spec = response.spec
        return spec.bytes_of(response.prediction) if isinstance(spec, TemplatedSpec) else encode(response)

    return encode_inferred


@dataclass(frozen=True, kw_only=True)
class RequestTemplate(Generic[_Request]):
    """A request whose single tensor may have any other elements; see `template_with`.

    Attributes:
        content: The elements as bytes of the message.
        others: Everything else in the request.
        array: The elements as the array of the request.
        with_array: Returns the request with other elements, of the same dtype and shape.
    """

    content: bytes
    others: object
    array: Array
    with_array: Callable[[Array], _Request]


def template_with(
    content: bytes, array: Array, with_array: Callable[[Array], _Request], *, others: object
) -> RequestTemplate[_Request] | None:
    """Return a template, or None for a dtype with invalid byte patterns; see `RequestTemplate`."""
    if not may_have_any_content(array.dtype):
        return None
    return RequestTemplate(content=content, others=others, array=array, with_array=with_array)


def may_have_any_content(dtype: np.dtype[Any]) -> bool:
    """Return whether any bytes of the right length are valid elements of a dtype."""
    return dtype.kind not in "OSUb"


@dataclass(frozen=True, kw_only=True)
class _KnownBytes(Generic[_Request]):
    """The bytes of a template: identical except for the elements of the tensor."""

    before: bytes
    after: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    with_array: Callable[[Array], _Request]


class ElementTemplates(Protocol[_Message_contra, _Request_co]):
    """Matches requests whose elements are built one by one."""

    def match(self, data: bytes, begin: int) -> _Request_co | None:
        """Return the request in ``data[begin:]``, or None if it matches no template."""

    def learn(self, data: bytes, request: _Message_contra) -> None:
        """Possibly learn the template of a message."""


class TemplateCodec(Generic[_Message, _Request]):
    """A codec that first matches requests whose bytes equal an earlier request's, except for the tensor's elements.

    Matched requests are neither parsed nor copied. Learning a template parses a message again, so the codec learns only
    from the second, fourth, eighth, ... unmatched message of a size.

    Belongs to one thread.

    Args:
        parse: Parses bytes into a message; raises DecodeError if it cannot.
        template_of: Returns the template of a message, or None if it has none.
        path: The field numbers that lead to the elements; see `span_of`.
        encode: Returns the bytes of a response.
        strings: Matches requests with strings, whose messages differ in size.

    Attributes:
        encode: Returns the bytes of a response.
    """

    def __init__(
        self,
        parse: Callable[[bytes], _Message],
        template_of: Callable[[_Message], RequestTemplate[_Request] | None],
        path: Sequence[int],
        encode: Callable[[Any], Encoded],
        *,
        strings: ElementTemplates[_Message, _Request] | None = None,
    ) -> None:
        self._strings = strings
        self._path = path
        self._parse = parse
        self._template_of = template_of
        self._known: dict[int, _KnownBytes[_Request]] = {}
        self._unmatched: dict[int, int] = {}
        self.encode = encode

    def decode(self, data: bytes, begin: int = 0) -> _Message | _Request:
        """See `understudy.service.calls.methods.Codec`."""
        known = self._known.get(len(data) - begin)
        if known is not None and data.startswith(known.before, begin) and data.endswith(known.after):
            return known.with_array(np.ndarray(known.shape, known.dtype, data, begin + len(known.before)))
        if self._strings is not None and (request := self._strings.match(data, begin)) is not None:
            return request
        data = data[begin:]
        message = self._parse(data)
        self._learn(data, message)
        return message

    def _learn(self, data: bytes, message: _Message) -> None:
        """Record an unmatched message and its bytes, and possibly learn its template."""
        size = len(data)
        times = self._unmatched.get(size, 0) + 1
        if len(self._unmatched) >= _REMEMBERED:
            self._unmatched.clear()
            self._known.clear()
        self._unmatched[size] = times
        if times == 1 or times & (times - 1) or size > LARGEST_BYTES:
            return
        if self._strings is not None:
            self._strings.learn(data, message)
        template = self._template_of(message)
        known = None if template is None else self._learned_from(data, template)
        if known is not None:
            self._known[size] = known

    def _learned_from(self, data: bytes, template: RequestTemplate[_Request]) -> _KnownBytes[_Request] | None:
        """Return the bytes of a template after locating its elements in the message.

        It also verifies that a message with other elements in that span differs in nothing else.
        """
        content, array = template.content, template.array
        if not content or len(data) - len(content) > _LARGEST_AROUND_BYTES:
            return None
        span = span_of(data, self._path)
        if span is None or data[slice(*span)] != content:
            return None
        before, after = data[: span[0]], data[span[1] :]
        other = content.translate(COMPLEMENT)
        try:
            other_template = self._template_of(self._parse(before + other + after))
        except DecodeError:
            return None
        if other_template is None or other_template.content != other or other_template.others != template.others:
            return None
        if (other_template.array.dtype, other_template.array.shape) != (array.dtype, array.shape):
            return None
        return _KnownBytes(
            before=before, after=after, dtype=array.dtype, shape=array.shape, with_array=template.with_array
        )


class _Known(NamedTuple):
    """The bytes of responses: identical except for the elements of the tensor."""

    before: bytes
    after: bytes


class ResponseTemplateCache:
    """Builds the responses to similar requests. Belongs to one thread.

    Args:
        encode: Returns the bytes of the response for a prediction. They must depend on the prediction only.
    """

    def __init__(self, encode: Callable[[Prediction], Encoded]) -> None:
        self._encode = encode
        self._known: dict[Hashable, _Known | None] = {}

    def bytes_of(self, prediction: Prediction) -> Encoded:
        """Return the bytes of the response for a prediction; raise what ``encode`` raises."""
        outputs, step = prediction
        if len(outputs) != 1:
            return self._encode(prediction)
        ((name, array),) = outputs.items()
        key = (name, array.dtype, array.shape, step)
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = self._learned(name, array, step)
        known = self._known[key]
        if known is None:
            return self._encode(prediction)
        return known.before + array.tobytes() + known.after

    def _learned(self, name: str, array: Array, step: int) -> _Known | None:
        """Return the bytes of responses after verifying that other elements change one span and nothing else."""
        if not (may_have_any_content(array.dtype) and 0 < array.nbytes <= LARGEST_BYTES):
            return None
        content = array.tobytes()
        data = self._encode_one(name, array, step)
        before, found, after = data.rpartition(content)
        other = content.translate(COMPLEMENT)
        other_array = np.ndarray(array.shape, array.dtype, other)
        is_all = bool(found) and self._encode_one(name, other_array, step) == before + other + after
        return _Known(before, after) if is_all else None

    def _encode_one(self, name: str, array: Array, step: int) -> bytes:
        return at_once(self._encode(Prediction(outputs={name: array}, step=step)))
