"""The protocol's element types, and NumPy arrays as its raw bytes and typed contents."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.evaluator.types import Array
from understudy.oip import inference_pb2, model_config_pb2
from understudy.wire import WireError, check_count, check_shape, from_content, from_elements, numbers, strings

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


def decode_raw(content: bytes, datatype: str, shape: Sequence[int], *, name: str) -> Array:
    """Return raw bytes as an array: little-endian; each BYTES element follows its length in four bytes.

    Raises:
        WireError: The datatype is unknown, the shape is impossible, or the bytes do not fill it.
    """
    dtype = dtype_of(datatype, name)
    if datatype != BYTES:
        return from_content(content, dtype, shape, name=name)
    expected = math.prod(check_shape(shape, name=name))
    if expected * _LENGTH.size >= len(content) + _LENGTH.size:
        raise WireError(
            f"{name}: shape {list(shape)} needs {expected} BYTES elements, but got at most "
            f"{len(content) // _LENGTH.size}"
        )
    return from_elements(strings(_split(content, expected, name)), shape, noun="BYTES elements", name=name)


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


def encode_typed(array: Array, datatype: str) -> inference_pb2.InferTensorContents:
    """Return an array as typed contents, for a datatype that has them; the inverse of `decode_typed`."""
    return inference_pb2.InferTensorContents(**{CONTENTS_FIELDS[datatype]: array.ravel().tolist()})


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
