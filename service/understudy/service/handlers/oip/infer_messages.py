"""The gRPC messages of an inference."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Prediction
from understudy.oip import inference_pb2
from understudy.service.calls.status import Failure, UnsupportedError
from understudy.service.handlers.oip.inference import (
    Inference,
    Parameters,
    add_form,
    add_input,
    check_parameters,
    check_tensor_parameters,
)
from understudy.service.handlers.oip.tensors import (
    BYTES,
    CONTENTS_FIELDS,
    DATATYPES,
    decode_raw,
    decode_typed,
    encode_raw,
    encode_typed,
)
from understudy.service.handlers.request_templates import RequestTemplate, RequestTemplateCache, template_with
from understudy.service.handlers.response_templates import ResponseTemplateCache, Serializable
from understudy.service.handlers.served_model import wanted_outputs
from understudy.wire import WireError

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


class TemplatedInfer(NamedTuple):
    """A request that `RequestTemplateCache` matched.

    Attributes:
        model_name: The model's name.
        spec: What the response depends on.
        inference: The request.
        responses: Builds the responses to all requests of this template.
    """

    model_name: str
    spec: ResponseSpec
    inference: Inference
    responses: ResponseTemplateCache


InferRequest = inference_pb2.ModelInferRequest | TemplatedInfer


def template_cache() -> RequestTemplateCache[inference_pb2.ModelInferRequest, TemplatedInfer]:
    """Return a template cache for requests with one input in raw contents."""
    return RequestTemplateCache(
        inference_pb2.ModelInferRequest.FromString,
        _template_of,
        (inference_pb2.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,),
    )


def response_spec(request: InferRequest) -> ResponseSpec:
    """Return what the response to a request depends on."""
    if isinstance(request, TemplatedInfer):
        return request.spec
    parameters = request.parameters
    return ResponseSpec(
        model_name=request.model_name,
        id=request.id,
        outputs=_output_names(request),
        typed=not request.raw_input_contents,
        says_final=_FINAL_WANTED in parameters and parameters[_FINAL_WANTED].bool_param,
    )


def inference_of(request: InferRequest) -> Inference:
    """Return the inference request in a message.

    Raises:
        WireError: A tensor is malformed.
        InvalidInputError: A parameter is malformed, or an input is present twice.
        UnsupportedError: It requests an unsupported feature.
    """
    if isinstance(request, TemplatedInfer):
        return request.inference
    for output in request.outputs:
        check_tensor_parameters(output.name, parameters_of(output.parameters))
    return Inference(
        model_name=request.model_name,
        model_version=request.model_version,
        id=request.id,
        parameters=check_parameters(parameters_of(request.parameters)),
        inputs=_inputs_of(request),
        outputs=_output_names(request),
    )


def forms_of(request: inference_pb2.ModelInferRequest) -> dict[str, ArrayForm]:
    """Return the declared forms of a message's inputs.

    Raises:
        WireError: A datatype is unknown, or a shape is impossible.
        InvalidInputError: An input is present twice.
    """
    forms: dict[str, ArrayForm] = {}
    for tensor in request.inputs:
        add_form(forms, tensor.name, tensor.datatype, tensor.shape)
    return forms


def is_built(request: inference_pb2.ModelInferRequest) -> bool:
    """Return whether decoding a message builds arrays element by element, rather than views of its bytes."""
    return not request.raw_input_contents or any(tensor.datatype == BYTES for tensor in request.inputs)


def response_to(request: InferRequest, prediction: Prediction) -> Serializable:
    """Return the response message; raise what `response_of` raises."""
    if isinstance(request, TemplatedInfer):
        return request.responses.of(prediction)
    return response_of(response_spec(request), prediction)


def response_of(spec: ResponseSpec, prediction: Prediction) -> inference_pb2.ModelInferResponse:
    """Return the response message: typed contents if the request had them and every output supports them, else raw.

    Raises:
        InvalidInputError: A requested output does not exist.
    """
    response = inference_pb2.ModelInferResponse(
        model_name=spec.model_name, model_version=str(prediction.step), id=spec.id
    )
    outputs = wanted_outputs(prediction, spec.outputs)
    datatypes = {name: datatype_of(array) for name, array in outputs.items()}
    typed = spec.typed and all(datatype in CONTENTS_FIELDS for datatype in datatypes.values())
    for name, array in outputs.items():
        tensor = response.outputs.add(name=name, datatype=datatypes[name], shape=array.shape)
        if typed:
            tensor.contents.CopyFrom(encode_typed(array, datatypes[name]))
        else:
            response.raw_output_contents.append(encode_raw(array))
    if spec.says_final:
        response.parameters[_FINAL].bool_param = True
    return response


def stream_response_of(spec: ResponseSpec, prediction: Prediction) -> inference_pb2.ModelStreamInferResponse:
    """Return the response message on a stream; raise what `response_of` raises."""
    return inference_pb2.ModelStreamInferResponse(infer_response=response_of(spec, prediction))


def stream_error_of(spec: ResponseSpec, failure: Failure) -> inference_pb2.ModelStreamInferResponse:
    """Return the message for a failure on a stream, with the request's id."""
    response = inference_pb2.ModelInferResponse(model_name=spec.model_name, id=spec.id)
    if spec.says_final:
        response.parameters[_FINAL].bool_param = True
    return inference_pb2.ModelStreamInferResponse(error_message=failure.message, infer_response=response)


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


def _template_of(request: inference_pb2.ModelInferRequest) -> RequestTemplate[TemplatedInfer] | None:
    if len(request.raw_input_contents) != 1 or request.id:  # ids are rarely equal
        return None
    try:
        inference = inference_of(request)
    except (WireError, InvalidInputError, UnsupportedError):
        return None
    model_name, inputs, version, identifier, parameters, outputs = inference
    ((name, array),) = inputs.items()
    reply = response_spec(request)
    responses = ResponseTemplateCache(lambda prediction: response_of(reply, prediction))

    def with_array(array: Array) -> TemplatedInfer:
        inferred = Inference(model_name, {name: array}, version, identifier, parameters, outputs)
        return TemplatedInfer(model_name, reply, inferred, responses)

    return template_with(
        request.raw_input_contents[0], array, with_array, others=(name, inference._replace(inputs={}), reply)
    )


def _output_names(request: inference_pb2.ModelInferRequest) -> tuple[str, ...]:
    outputs = request.outputs
    return tuple(output.name for output in outputs) if outputs else ()


def _inputs_of(request: inference_pb2.ModelInferRequest) -> dict[str, Array]:
    raw = request.raw_input_contents
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


def _raw_input(tensor: inference_pb2.ModelInferRequest.InferInputTensor, content: bytes) -> Array:
    name = f"input {tensor.name!r}"
    if tensor.HasField("contents") and tensor.contents.ByteSize():
        raise WireError(f"{name}: got both raw and typed contents; send one of them")
    return decode_raw(content, tensor.datatype, tensor.shape, name=name)


def _typed_input(tensor: inference_pb2.ModelInferRequest.InferInputTensor) -> Array:
    return decode_typed(tensor.contents, tensor.datatype, tensor.shape, name=f"input {tensor.name!r}")
