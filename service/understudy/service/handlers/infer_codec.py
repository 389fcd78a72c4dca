"""The bytes of the gRPC messages of an inference (Open Inference Protocol), and what handlers see of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Prediction
from understudy.oip import inference_pb2
from understudy.service.calls.methods import Encoded
from understudy.service.calls.parsing import joined, nested, parse_zero_copy
from understudy.service.calls.status import Failure
from understudy.service.handlers.inference import (
    BYTES,
    CONTENTS_FIELDS,
    DATATYPES,
    MAX_ELEMENTS_AT_ONCE,
    Inference,
    Parameters,
    add_form,
    add_input,
    check_parameters,
    check_tensor_parameters,
    decode_raw,
    decode_typed,
    encode_raw,
    encode_typed,
)
from understudy.service.handlers.predict_codec import bytes_in, is_large
from understudy.wire import Contents, WireError

_FINAL_WANTED = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"


class ResponseSpec(NamedTuple):
    """The parts of a request that its response depends on.

    Attributes:
        model_name: The model's name.
        id: The caller's id of the request.
        outputs: The names of the requested outputs; empty for all.
        typed: Whether the caller sent, and so expects, typed contents.
        says_final: Whether to mark each response as the final one of its request.
    """

    model_name: str
    id: str
    outputs: tuple[str, ...]
    typed: bool
    says_final: bool


class InferRequest(Protocol):
    """A request to infer, as its handler sees it, whatever codec decoded it."""

    @property
    def model_name(self) -> str:
        """The model's name."""

    @property
    def model_version(self) -> str:
        """A step or a label as text; empty for the serving version."""

    @property
    def spec(self) -> ResponseSpec:
        """What the response depends on."""

    def forms_to_build(self) -> Mapping[str, ArrayForm] | None:
        """Return the declared forms if arrays are built element by element; None if they are views of the bytes.

        Raises:
            WireError: A datatype is unknown, or a shape is impossible.
            InvalidInputError: An input is present twice.
        """

    def inference(self) -> Inference:
        """Return the inference request. Thread-safe.

        Raises:
            WireError: A tensor is malformed.
            InvalidInputError: A parameter is malformed, or an input is present twice.
            UnsupportedError: It requests an unsupported feature.
        """


class InferResponse(NamedTuple):
    """The response to a request: the requested outputs, and what else it depends on."""

    spec: ResponseSpec
    prediction: Prediction


class InferFailure(NamedTuple):
    """A failure of a request on a stream."""

    spec: ResponseSpec
    failure: Failure


class InferMessage:
    """An `InferRequest` in a message.

    Attributes:
        message: The message.
        contents: See `ZeroCopyMessage`.
    """

    __slots__ = ("contents", "message")

    def __init__(self, message: inference_pb2.ModelInferRequest, contents: Contents) -> None:
        self.message = message
        self.contents = contents

    @property
    def model_name(self) -> str:
        """See `InferRequest`."""
        return self.message.model_name

    @property
    def model_version(self) -> str:
        """See `InferRequest`."""
        return self.message.model_version

    @property
    def spec(self) -> ResponseSpec:
        """See `InferRequest`."""
        message = self.message
        parameters = message.parameters
        return ResponseSpec(
            model_name=message.model_name,
            id=message.id,
            outputs=_output_names(message),
            typed=not message.raw_input_contents,
            says_final=_FINAL_WANTED in parameters and parameters[_FINAL_WANTED].bool_param,
        )

    def forms_to_build(self) -> Mapping[str, ArrayForm] | None:
        """See `InferRequest`."""
        message = self.message
        if message.raw_input_contents and all(tensor.datatype != BYTES for tensor in message.inputs):
            return None
        forms: dict[str, ArrayForm] = {}
        for tensor in message.inputs:
            add_form(forms, tensor.name, tensor.datatype, tensor.shape)
        return forms

    def inference(self) -> Inference:
        """See `InferRequest`."""
        return self.without_inputs()._replace(inputs=_inputs_of(self.message, self.contents))

    def without_inputs(self) -> Inference:
        """Return the request without inputs; raise InvalidInputError or UnsupportedError as `inference` does."""
        message = self.message
        for output in message.outputs:
            check_tensor_parameters(output.name, parameters_of(output.parameters))
        return Inference(
            model_name=message.model_name,
            model_version=message.model_version,
            id=message.id,
            parameters=check_parameters(parameters_of(message.parameters)),
            inputs={},
            outputs=_output_names(message),
        )


class InferCodec:
    """The codec of ModelInfer."""

    def decode(self, data: bytes, begin: int = 0) -> InferMessage:
        """See `understudy.service.calls.methods.Codec`."""
        return InferMessage(*parse_zero_copy(inference_pb2.ModelInferRequest, data, begin))

    def encode(self, response: InferResponse) -> Encoded:
        """See `understudy.service.calls.methods.Codec`."""
        if _is_large(response):
            return lambda: joined(_pieces_of(response))
        return _message_of(response).SerializeToString()


class InferStreamCodec:
    """The codec of ModelStreamInfer."""

    def decode(self, data: bytes, begin: int = 0) -> InferMessage:
        """See `understudy.service.calls.methods.Codec`."""
        return InferMessage(*parse_zero_copy(inference_pb2.ModelInferRequest, data, begin))

    def encode(self, response: InferResponse | InferFailure) -> Encoded:
        """See `understudy.service.calls.methods.Codec`."""
        if isinstance(response, InferFailure):
            return _error_message(response).SerializeToString()
        if _is_large(response):
            return lambda: joined(nested(_INFER_RESPONSE, _pieces_of(response)))
        return inference_pb2.ModelStreamInferResponse(infer_response=_message_of(response)).SerializeToString()


def _is_large(response: InferResponse) -> bool:
    """Return whether a response takes long to build."""
    outputs = response.prediction.outputs.values()
    is_typed = response.spec.typed and sum(array.size for array in outputs) > MAX_ELEMENTS_AT_ONCE
    return is_typed or is_large(response.prediction)


def _pieces_of(response: InferResponse) -> list[bytes | memoryview]:
    """Return the bytes of a response without copying raw numbers."""
    message = _message_of(response, with_raw=False)
    pieces: list[bytes | memoryview] = [message.SerializeToString()]
    if message.outputs and not message.outputs[0].HasField("contents"):
        pieces += [piece for array in response.prediction.outputs.values() for piece in nested(_RAW, [_raw(array)])]
    return pieces


def _raw(array: Array) -> bytes | memoryview:
    return encode_raw(array) if array.dtype.kind == "O" else bytes_in(array)


_RAW: Final = inference_pb2.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_INFER_RESPONSE: Final = inference_pb2.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER


def _message_of(response: InferResponse, *, with_raw: bool = True) -> inference_pb2.ModelInferResponse:
    """Return a response as a message: typed contents if the request had them and every output may, else raw ones."""
    spec, prediction = response
    message = inference_pb2.ModelInferResponse(
        model_name=spec.model_name, model_version=str(prediction.step), id=spec.id
    )
    datatypes = {name: datatype_of(array) for name, array in prediction.outputs.items()}
    typed = spec.typed and all(datatype in CONTENTS_FIELDS for datatype in datatypes.values())
    for name, array in prediction.outputs.items():
        tensor = message.outputs.add(name=name, datatype=datatypes[name], shape=array.shape)
        if typed:
            encode_typed(array, datatypes[name], tensor.contents)
        elif with_raw:
            message.raw_output_contents.append(encode_raw(array))
    if spec.says_final:
        message.parameters[_FINAL].bool_param = True
    return message


def _error_message(response: InferFailure) -> inference_pb2.ModelStreamInferResponse:
    """Return a failure on a stream as a message, with the request's id."""
    spec, failure = response
    message = inference_pb2.ModelInferResponse(model_name=spec.model_name, id=spec.id)
    if spec.says_final:
        message.parameters[_FINAL].bool_param = True
    return inference_pb2.ModelStreamInferResponse(error_message=failure.message, infer_response=message)


def parameters_of(parameters: Mapping[str, inference_pb2.InferParameter]) -> Parameters:
    """Return parameters as Python values; leave out those without a value."""
    if not parameters:
        return {}
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, choice) for name, (value, choice) in chosen.items() if choice is not None}


def datatype_of(array: Array) -> str:
    """Return the protocol's datatype of an array."""
    return _datatype(array.dtype)


@functools.cache
def _datatype(dtype: np.dtype[Any]) -> str:
    return DATATYPES["string" if dtype.kind == "O" else dtype.name]


def _output_names(request: inference_pb2.ModelInferRequest) -> tuple[str, ...]:
    outputs = request.outputs
    return tuple(output.name for output in outputs) if outputs else ()


def _inputs_of(request: inference_pb2.ModelInferRequest, contents: Contents) -> dict[str, Array]:
    raw: Sequence[bytes | memoryview] = request.raw_input_contents
    if contents:
        raw = [contents.get(content, content) for content in request.raw_input_contents]
    if raw and len(raw) != len(request.inputs):
        raise InvalidInputError(
            f"got {len(raw)} raw contents for {len(request.inputs)} inputs; send one for each, or none and typed "
            "contents in each input"
        )
    inputs: dict[str, Array] = {}
    for index, tensor in enumerate(request.inputs):
        if parameters := tensor.parameters:
            check_tensor_parameters(tensor.name, parameters_of(parameters))
        array = _raw_input(tensor, raw[index]) if raw else _typed_input(tensor)
        add_input(inputs, tensor.name, array)
    return inputs


def _raw_input(tensor: inference_pb2.ModelInferRequest.InferInputTensor, content: bytes | memoryview) -> Array:
    name = f"input {tensor.name!r}"
    if tensor.HasField("contents") and tensor.contents.ByteSize():
        raise WireError(f"{name}: got both raw and typed contents; send one of them")
    return decode_raw(content, tensor.datatype, tensor.shape, name=name)


def _typed_input(tensor: inference_pb2.ModelInferRequest.InferInputTensor) -> Array:
    return decode_typed(tensor.contents, tensor.datatype, tensor.shape, name=f"input {tensor.name!r}")
