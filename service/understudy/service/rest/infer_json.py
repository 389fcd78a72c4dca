"""The JSON of an inference, and the binary data after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Prediction
from understudy.service.calls.parsing import joined
from understudy.service.handlers.infer_codec import datatype_of
from understudy.service.handlers.inference import (
    Inference,
    Parameters,
    add_form,
    add_input,
    check_parameters,
    check_tensor_parameters,
    decode_raw,
    encode_raw,
)
from understudy.service.handlers.predict_codec import bytes_in
from understudy.service.rest.json_values import (
    compact,
    decode_data,
    encode_data,
    integers,
    items,
    let_go,
    optional_text,
    parameters,
    parse_json,
    text,
)
from understudy.service.served_model import wanted_outputs
from understudy.wire import WireError

_SIZE: Final = "binary_data_size"
_BINARY: Final = "binary_data"
_ALL_BINARY: Final = "binary_data_output"


CheckForms = Callable[[Mapping[str, ArrayForm], str], None]
"""Raises InvalidInputError if inputs, before they are built, do not fit a version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestInference:
    """An inference request, and which outputs to return as binary data.

    Attributes:
        inference: The request.
        binary: By output name, whether to return it as binary data.
        binary_by_default: The same for the other outputs.
    """

    inference: Inference
    binary: Mapping[str, bool]
    binary_by_default: bool


def parse_infer(
    body: bytes,
    json_bytes: int | None,
    *,
    model_name: str,
    model_version: str,
    check_forms: CheckForms,
) -> RestInference:
    """Parse a body into an inference request.

    Args:
        body: JSON, then the binary data of the inputs that use it, in their order.
        json_bytes: The length of the JSON; None if there is no binary data.
        model_name: The name in the path.
        model_version: The version in the path; empty if there is none.
        check_forms: Raises InvalidInputError if the inputs, before they are built, do not fit the version.

    Raises:
        InvalidInputError: The JSON is malformed, or is not an inference request.
        WireError: A tensor is malformed.
        UnsupportedError: It requests an unsupported feature.
    """
    if json_bytes is not None and not 0 <= json_bytes <= len(body):
        raise InvalidInputError(
            f"Inference-Header-Content-Length is {json_bytes}; it counts bytes of the body, which has {len(body)}"
        )
    request = parse_json(body[:json_bytes])
    try:
        return _parsed(request, body, json_bytes, model_name=model_name, model_version=model_version, check=check_forms)
    finally:
        let_go(request)


def _parsed(
    request: Mapping[str, Any],
    body: bytes,
    json_bytes: int | None,
    *,
    model_name: str,
    model_version: str,
    check: CheckForms,
) -> RestInference:
    binary = _BinaryData(memoryview(body)[len(body) if json_bytes is None else json_bytes :])
    tensors = items(request, "inputs", "the request")
    check(_forms(tensors), model_version)
    inputs = _inputs(tensors, binary)
    binary.check_used_up()
    settings = parameters(request, "the request")
    outputs = _outputs(request)
    return RestInference(
        inference=Inference(
            model_name=model_name,
            model_version=model_version,
            id=optional_text(request, "id", "the request"),
            parameters=check_parameters(settings),
            inputs=inputs,
            outputs=tuple(outputs),
        ),
        binary={name: bool(chosen[_BINARY]) for name, chosen in outputs.items() if _BINARY in chosen},
        binary_by_default=bool(settings.get(_ALL_BINARY, False)),
    )


def render(request: RestInference, prediction: Prediction) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if binary data follows.

    Raises:
        InvalidInputError: A requested output does not exist, or cannot be encoded as JSON.
    """
    inference = request.inference
    chunks: list[bytes | memoryview] = []
    outputs: list[str] = []
    for name, array in wanted_outputs(prediction, inference.outputs).items():
        tensor: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
        if request.binary.get(name, request.binary_by_default):
            chunks.append(encode_raw(array) if array.dtype.kind == "O" else bytes_in(array))
            tensor["parameters"] = {_SIZE: len(chunks[-1])}
            outputs.append(compact(tensor))
        else:
            outputs.append(f'{compact(tensor)[:-1]},"data":{encode_data(array, name=name)}}}')
    answer = {"model_name": inference.model_name, "model_version": str(prediction.step)}
    if inference.id:
        answer["id"] = inference.id
    header = f'{compact(answer)[:-1]},"outputs":[{",".join(outputs)}]}}'.encode()
    return joined([header, *chunks]), len(header) if chunks else None


class _BinaryData:
    """The bytes after the JSON, consumed one tensor after another."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def take(self, size: int, name: str) -> memoryview:
        left = len(self._content) - self._at
        if not 0 <= size <= left:
            raise WireError(f"{name}: {_SIZE} is {size}, but {left} bytes of binary data are left")
        self._at += size
        return self._content[self._at - size : self._at]

    def check_used_up(self) -> None:
        left = len(self._content) - self._at
        if left:
            raise InvalidInputError(f"{left} bytes of binary data belong to no input; give each input's {_SIZE}")


def _forms(tensors: Sequence[Mapping[str, Any]]) -> dict[str, ArrayForm]:
    forms: dict[str, ArrayForm] = {}
    for number, tensor in enumerate(tensors):
        bare_name = text(tensor, "name", f"input {number}")
        name = f"input {bare_name!r}"
        add_form(forms, bare_name, text(tensor, "datatype", name), integers(tensor, "shape", name))
    return forms


def _inputs(tensors: Sequence[Mapping[str, Any]], binary: _BinaryData) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    for number, tensor in enumerate(tensors):
        bare_name = text(tensor, "name", f"input {number}")
        name = f"input {bare_name!r}"
        settings = parameters(tensor, name)
        check_tensor_parameters(bare_name, settings)
        add_input(inputs, bare_name, _array(tensor, settings, binary, name))
    return inputs


def _array(tensor: Mapping[str, Any], settings: Parameters, binary: _BinaryData, name: str) -> Array:
    datatype = text(tensor, "datatype", name)
    shape = integers(tensor, "shape", name)
    size = settings.get(_SIZE)
    if size is None:
        if "data" not in tensor:
            raise WireError(f"{name}: it has no data; give an array, or {_SIZE} and binary data")
        return decode_data(tensor["data"], datatype, shape, name=name)
    if "data" in tensor:
        raise WireError(f"{name}: got both data and {_SIZE}; send one of them")
    if type(size) is not int:
        raise WireError(f"{name}: {_SIZE} is {size!r}; a whole number was expected")
    return decode_raw(binary.take(size, name), datatype, shape, name=name)


def _outputs(request: Mapping[str, Any]) -> dict[str, Parameters]:
    outputs = {}
    for number, output in enumerate(items(request, "outputs", "the request")):
        name = text(output, "name", f"output {number}")
        outputs[name] = parameters(output, f"output {name!r}")
        check_tensor_parameters(name, outputs[name])
    return outputs
