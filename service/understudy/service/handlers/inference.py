"""An inference request of the Open Inference Protocol and its tensors: element types, raw bytes and typed contents."""

from __future__ import annotations

import functools
import math
import struct
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Arrays
from understudy.oip import inference_pb2, model_config_pb2
from understudy.service.calls.status import UnsupportedError
from understudy.wire import WireError, check_count, check_shape, from_content, from_elements, numbers, strings

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]

MAX_ELEMENTS_AT_ONCE = 8192
"""Up to this many elements are decoded on the event loop; more on another thread."""

MAX_KEPT = 65_536
"""The most characters of a request that wait with it, as its response repeats or needs them."""

_MICROSECONDS = 1e6
_LARGEST = 2**64 - 1

_UNSUPPORTED: Mapping[str, str] = {
    "sequence_id": "sequences are not supported; leave sequence_id out",
    "shared_memory_region": "shared memory is not supported; send and take tensors in the message",
    "classification": "classification is not supported; sort the output on the client",
}


class Inference(NamedTuple):
    """An inference request.

    Attributes:
        model_name: The model's name.
        inputs: Every input by name, ``[examples, ...]``.
        model_version: A step or a label as text; empty for the serving version.
        id: The caller's id of the request.
        parameters: The checked parameters of the request.
        outputs: The names of the requested outputs, in order; empty for all.
    """

    model_name: str
    inputs: Arrays
    model_version: str = ""
    id: str = ""
    parameters: Parameters = MappingProxyType({})
    outputs: tuple[str, ...] = ()

    def deadline(self, callers: float | None) -> float | None:
        """Return the deadline: the earlier of the caller's and the request's own.

        Both are in seconds on the clock of `time.monotonic`; None for no deadline.
        """
        timeout = _whole_number(self.parameters, "timeout", "microseconds") if self.parameters else 0
        if not timeout:
            return callers
        own = time.monotonic() + timeout / _MICROSECONDS
        return own if callers is None else min(own, callers)


def check_kept(identifier: str, outputs: Sequence[str]) -> None:
    """Raise InvalidInputError if the id and the names of the requested outputs are too long."""
    size = len(identifier) + sum(map(len, outputs))
    if size > MAX_KEPT:
        raise InvalidInputError(
            f"the id and the names of the requested outputs have {size} characters; {MAX_KEPT} is the limit"
        )


def check_parameters(parameters: Parameters) -> Parameters:
    """Check and return a request's parameters; ignore unknown ones.

    Raises:
        UnsupportedError: One requests an unsupported feature.
        InvalidInputError: The timeout or the priority is not a whole number of at least 0.
    """
    if not parameters:
        return parameters
    _refuse_unsupported("the request", parameters)
    _whole_number(parameters, "timeout", "microseconds")
    _whole_number(parameters, "priority", "a level")
    return parameters


def check_tensor_parameters(name: str, parameters: Parameters) -> None:
    """Raise UnsupportedError if a tensor's parameter requests an unsupported feature."""
    if parameters:
        _refuse_unsupported(f"tensor {name!r}", parameters)


def add_input(inputs: dict[str, Array], name: str, array: Array) -> None:
    """Add an input; raise InvalidInputError if its name is already present."""
    if name in inputs:
        raise InvalidInputError(f"input {name!r} is present twice; send it once")
    inputs[name] = array


def add_form(forms: dict[str, ArrayForm], name: str, datatype: str, shape: Sequence[int]) -> None:
    """Add the declared form of an input.

    Raises:
        WireError: The datatype is unknown, or the shape is impossible.
        InvalidInputError: Its name is already present.
    """
    if name in forms:
        raise InvalidInputError(f"input {name!r} is present twice; send it once")
    what = f"input {name!r}"
    forms[name] = ArrayForm(dtype_of(datatype, what), check_shape(shape, name=what))


def elements_in(forms: Mapping[str, ArrayForm]) -> int:
    """Return the total number of elements of the inputs."""
    return sum(math.prod(form.shape) for form in forms.values())


def _refuse_unsupported(what: str, parameters: Parameters) -> None:
    for name, remedy in _UNSUPPORTED.items():
        if parameters.get(name):
            raise UnsupportedError(f"{what} has the parameter {name!r}; {remedy}")


def _whole_number(parameters: Parameters, name: str, unit: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise InvalidInputError(f"parameter {name!r} is {value!r}; give {unit} as a whole number from 0 up")
    return value


BYTES = "BYTES"
BOOL = "BOOL"

DATATYPES: Mapping[str, str] = {
    "bool": BOOL,
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "string": BYTES,
}
"""The protocol's datatype by a signature's dtype."""

_DTYPES: Mapping[str, str] = {datatype: dtype for dtype, datatype in DATATYPES.items()}

CONTENTS_FIELDS: Mapping[str, str] = {
    BOOL: "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""The field of InferTensorContents for each datatype that has one."""


def dtype_of(datatype: str, name: str) -> str:
    """Return a signature's dtype for a datatype of the protocol.

    Raises:
        WireError: The protocol has no such datatype; the text names the tensor.
    """
    try:
        return _DTYPES[datatype]
    except KeyError:
        raise WireError(f"{name}: datatype {datatype!r} is unknown; expected one of {', '.join(_DTYPES)}") from None


def config_type(dtype: str) -> model_config_pb2.DataType.ValueType:
    """Return a model configuration's DataType for a signature's dtype."""
    datatype = DATATYPES[dtype]
    return model_config_pb2.DataType.Value("TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}")


_LENGTH = struct.Struct("<I")


def decode_raw(content: bytes | memoryview, datatype: str, shape: Sequence[int], *, name: str) -> Array:
    """Return raw bytes as an array: little-endian; each BYTES element follows its length in four bytes.

    Raises:
        WireError: The datatype is unknown, the shape is impossible, or the bytes do not fill it.
    """
    dtype = dtype_of(datatype, name)
    if datatype != BYTES:
        return from_content(content, dtype, shape, name=name)
    content = bytes(content)  # of which the elements are copies
    expected = math.prod(check_shape(shape, name=name))
    if expected * _LENGTH.size >= len(content) + _LENGTH.size:
        raise WireError(
            f"{name}: shape {list(shape)} needs {expected} BYTES elements, but got at most "
            f"{len(content) // _LENGTH.size}"
        )
    elements = split_elements(content, 0, expected)
    if elements is None:
        elements = _split(content, expected, name)
    return from_elements(strings(elements), shape, noun="BYTES elements", name=name)


def split_elements(data: bytes, at: int, count: int) -> list[bytes] | None:
    """Return so many BYTES elements, or None unless they reach from a position to the end of the data."""
    elements: list[bytes] = []
    append, length_at, size = elements.append, _LENGTH.unpack_from, _LENGTH.size
    try:
        for _ in range(count):
            start = at + size
            at = start + length_at(data, at)[0]
            append(data[start:at])
    except struct.error:
        return None
    return elements if at == len(data) else None


def encode_raw(array: Array) -> bytes:
    """Return an array as raw bytes; the inverse of `decode_raw`."""
    if array.dtype.kind == "O":
        return b"".join(part for element in array.ravel() for part in (_LENGTH.pack(len(element)), element))
    return array.astype(_little_endian(array.dtype), copy=False).tobytes()


def decode_typed(
    contents: inference_pb2.InferTensorContents, datatype: str, shape: Sequence[int], *, name: str
) -> Array:
    """Return typed contents as an array.

    Raises:
        WireError: The datatype is unknown or has no typed contents, elements are in another datatype's field or do not
            fit the datatype, the shape is impossible, or the elements do not fill it.
    """
    dtype = dtype_of(datatype, name)
    field = CONTENTS_FIELDS.get(datatype)
    if field is None:
        raise WireError(
            f"{name}: {datatype} elements are supported as raw contents only; send them in raw_input_contents"
        )
    unmatched = [other.name for other, _ in contents.ListFields() if other.name != field]
    if unmatched:
        raise WireError(f"{name}: {datatype} elements belong in {field}, but got {', '.join(unmatched)}")
    values = getattr(contents, field)
    check_count(len(values), shape, noun=f"elements in {field}", name=name)
    flat = strings(values) if datatype == BYTES else _numbers(values, dtype, name)
    return from_elements(flat, shape, noun=f"elements in {field}", name=name)


def encode_typed(array: Array, datatype: str, contents: inference_pb2.InferTensorContents) -> None:
    """Write an array as typed contents, for a datatype that has them; the inverse of `decode_typed`."""
    contents.SetInParent()
    values, flat = getattr(contents, CONTENTS_FIELDS[datatype]), array.ravel()
    for start in range(0, len(flat), MAX_ELEMENTS_AT_ONCE):  # other threads run between the pieces
        values.extend(flat[start : start + MAX_ELEMENTS_AT_ONCE].tolist())


@functools.lru_cache(maxsize=64)  # NumPy creates a new dtype on each call
def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _split(content: bytes, expected: int, name: str) -> list[bytes]:
    """Split BYTES elements; stop at one more than expected."""
    elements: list[bytes] = []
    at = 0
    while at < len(content) and len(elements) <= expected:
        start = at + _LENGTH.size
        if start > len(content):
            raise WireError(
                f"{name}: BYTES element {len(elements)} is cut short: expected {_LENGTH.size} bytes of its length, "
                f"got {len(content) - at}"
            )
        (length,) = _LENGTH.unpack_from(content, at)
        at = start + length
        if at > len(content):
            raise WireError(
                f"{name}: BYTES element {len(elements)} is cut short: expected {length} bytes, got "
                f"{len(content) - start}"
            )
        elements.append(content[start:at])
    return elements


def _numbers(values: Sequence[Any], dtype: str, name: str) -> Array:
    try:
        return numbers(values, dtype)
    except OverflowError as error:
        raise WireError(f"{name}: an element does not fit {dtype}: {error}") from None
