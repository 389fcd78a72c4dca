"""Converts NumPy arrays to and from TensorFlow's TensorProto.

`tensorflow.make_ndarray` trusts its argument: it would fill a shape of terabytes from one value without a check. So
this module decodes messages from the network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorflow.core.framework import tensor_pb2, tensor_shape_pb2, types_pb2

from understudy.evaluator.types import Array, ArrayForm, TensorSpec
from understudy.wire import WireError, check_shape, fixed_size_dtype, from_content, from_elements, numbers, strings

STRING = "string"
_POINTER_BYTES = 8

_TYPES: Mapping[str, int] = {
    "bool": types_pb2.DT_BOOL,
    "uint8": types_pb2.DT_UINT8,
    "uint16": types_pb2.DT_UINT16,
    "uint32": types_pb2.DT_UINT32,
    "uint64": types_pb2.DT_UINT64,
    "int8": types_pb2.DT_INT8,
    "int16": types_pb2.DT_INT16,
    "int32": types_pb2.DT_INT32,
    "int64": types_pb2.DT_INT64,
    "float16": types_pb2.DT_HALF,
    "bfloat16": types_pb2.DT_BFLOAT16,
    "float32": types_pb2.DT_FLOAT,
    "float64": types_pb2.DT_DOUBLE,
    STRING: types_pb2.DT_STRING,
}
_NAMES: Mapping[int, str] = {number: name for name, number in _TYPES.items()}

_VALUE_FIELDS: Mapping[str, str] = {
    "bool": "bool_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "int64": "int64_val",
    "float16": "half_val",
    "bfloat16": "half_val",
    "float32": "float_val",
    "float64": "double_val",
    STRING: "string_val",
}
_SMALL_INTEGERS_FIELD = "int_val"
_BITS = "uint16"
_SCALAR_FIELDS = frozenset({*_VALUE_FIELDS.values(), _SMALL_INTEGERS_FIELD})


def decode(tensor: tensor_pb2.TensorProto, *, max_bytes: int, name: str) -> Array:
    """Return a message as a read-only array.

    Elements are in ``tensor_content`` or in the field of their type. In that field, as in TensorFlow, the last element
    fills in for missing ones, or zero if there is none.

    Args:
        tensor: The tensor as received.
        max_bytes: The largest array to build.
        name: What to call the tensor in errors.

    Raises:
        WireError: The type is unknown, the shape is impossible or too large, or elements are in two fields, in another
            type's field, too many for the shape, or out of range.
    """
    dtype = _dtype_of(tensor, name)
    shape = _shape_of(tensor, name)
    field = _VALUE_FIELDS.get(dtype, _SMALL_INTEGERS_FIELD)
    came = {other.name for other, _ in tensor.ListFields()} & _SCALAR_FIELDS
    if tensor.tensor_content:
        if came:
            raise WireError(f"{name}: got both tensor_content and {', '.join(sorted(came))}; send one of them")
        if dtype == STRING:
            raise WireError(f"{name}: DT_STRING elements belong in {field}, but got tensor_content")
        return from_content(tensor.tensor_content, dtype, shape, name=name)
    if came - {field}:
        raise WireError(f"{name}: {_type_name(dtype)} elements belong in {field}, but got {', '.join(sorted(came))}")
    values = getattr(tensor, field)
    if len(values) > math.prod(shape):
        raise WireError(
            f"{name}: shape {list(shape)} needs {math.prod(shape)} elements in {field}, but got {len(values)}"
        )
    return _filled(_elements(values, dtype, name), shape, max_bytes, name=name, field=field)


def form_of(tensor: tensor_pb2.TensorProto, *, name: str) -> ArrayForm:
    """Return the declared form of a message; raise WireError if the type is unknown or the shape impossible."""
    return ArrayForm(_dtype_of(tensor, name), _shape_of(tensor, name))


def size_of(form: ArrayForm) -> int:
    """Return the size in bytes of the array that `decode` builds, without the contents of strings."""
    return math.prod(form.shape) * (_POINTER_BYTES if form.dtype == STRING else fixed_size_dtype(form.dtype).itemsize)


def encode(array: Array) -> tensor_pb2.TensorProto:
    """Return an array as a message: strings in ``string_val``, all else in ``tensor_content``."""
    shape = tensor_shape_pb2.TensorShapeProto(
        dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=length) for length in array.shape]
    )
    if array.dtype.kind == "O":
        return tensor_pb2.TensorProto(dtype=_TYPES[STRING], tensor_shape=shape, string_val=array.ravel().tolist())
    content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return tensor_pb2.TensorProto(dtype=_TYPES[array.dtype.name], tensor_shape=shape, tensor_content=content)


def type_of(spec: TensorSpec) -> int:
    """Return TensorFlow's DataType of a signature's dtype."""
    return _TYPES[spec.dtype]


def _dtype_of(tensor: tensor_pb2.TensorProto, name: str) -> str:
    try:
        return _NAMES[tensor.dtype]
    except KeyError:
        known = ", ".join(_type_name(dtype) for dtype in _TYPES)
        raise WireError(f"{name}: data type number {tensor.dtype} cannot be served; expected one of {known}") from None


def _type_name(dtype: str) -> str:
    return str(types_pb2.DataType.Name(_TYPES[dtype]))


def _shape_of(tensor: tensor_pb2.TensorProto, name: str) -> tuple[int, ...]:
    if tensor.tensor_shape.unknown_rank:
        raise WireError(f"{name}: the shape is of unknown rank; say the length of every axis")
    shape = tuple(dimension.size for dimension in tensor.tensor_shape.dim)
    check_shape(shape, name=name)
    return shape


def _elements(values: Sequence[Any], dtype: str, name: str) -> Array:
    if dtype == STRING:
        return strings(values)
    try:
        if _VALUE_FIELDS.get(dtype) == "half_val":
            return numbers(values, _BITS).view(fixed_size_dtype(dtype))  # 16-bit patterns are encoded as integers
        return numbers(values, dtype)
    except OverflowError as error:
        raise WireError(f"{name}: an element does not fit {_type_name(dtype)}: {error}") from None


def _filled(flat: Array, shape: tuple[int, ...], max_bytes: int, *, name: str, field: str) -> Array:
    expected = math.prod(shape)
    if len(flat) < expected:
        needed = expected * flat.dtype.itemsize
        if needed > max_bytes:
            raise WireError(f"{name}: shape {list(shape)} needs {needed} bytes; at most {max_bytes} are taken")
        last = flat[-1:] if len(flat) else _zero(flat.dtype)
        flat = np.concatenate([flat, np.broadcast_to(last, expected - len(flat))])
    return from_elements(flat, shape, noun=f"elements in {field}", name=name)


def _zero(dtype: np.dtype[Any]) -> Array:
    return strings([b""]) if dtype.kind == "O" else np.zeros(1, dtype)
