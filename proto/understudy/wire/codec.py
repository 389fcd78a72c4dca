"""Encodes NumPy arrays as wire tensors and decodes them again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from understudy.v1 import tensor_pb2
from understudy.wire.dtypes import STRING, WireError, data_type, dtype_name, fixed_size_dtype

_STRING_KINDS = "OSTU"  # object, bytes, variable-width string, fixed-width string


def encode(array: npt.ArrayLike, *, name: str = "tensor") -> tensor_pb2.Tensor:
    """Return an array as a wire tensor.

    Args:
        array: Anything NumPy makes an array of: any byte order, any strides, any rank. Text and bytes (alone, nested
            in lists, or as arrays of dtype object, ``S``, ``U`` or ``StringDType``) become byte strings, text as
            UTF-8. NumPy drops the trailing NUL bytes of ``S`` arrays; use dtype object where they matter.
        name: What to call the tensor in errors.

    Raises:
        WireError: The array is ragged, its dtype cannot travel, or an object array holds something but text or bytes.
    """
    try:
        values = np.asarray(array)
    except ValueError as error:
        raise WireError(f"{name}: expected an array or evenly nested lists, but NumPy says: {error}") from error
    if values.dtype.kind in _STRING_KINDS:
        return _encode_strings(values, name)
    try:
        number = data_type(values.dtype.name)
    except WireError as error:
        raise WireError(f"{name}: {error}") from None
    native = values.astype(fixed_size_dtype(values.dtype.name), copy=False)
    return tensor_pb2.Tensor(dtype=number, shape=values.shape, content=native.tobytes())


def decode(tensor: tensor_pb2.Tensor, *, name: str = "tensor") -> npt.NDArray[Any]:
    """Return a wire tensor as a read-only array, without copying unless it holds strings.

    Args:
        tensor: What came over the wire.
        name: What to call the tensor in errors.

    Returns:
        An array of the tensor's shape and dtype; of dtype object, holding ``bytes``, for strings.

    Raises:
        WireError: The dtype is unknown, the shape is impossible, or the content does not fill the shape.
    """
    try:
        dtype = dtype_name(tensor.dtype)
    except WireError as error:
        raise WireError(f"{name}: {error}") from None
    shape = tuple(tensor.shape)
    if any(length < 0 for length in shape):
        raise WireError(f"{name}: shape {list(shape)} has a negative length; every length must be at least 0")
    flat = _decode_strings(tensor, shape, name) if dtype == STRING else _decode_content(tensor, dtype, shape, name)
    try:
        array = flat.reshape(shape)
    except ValueError as error:
        raise WireError(f"{name}: shape {list(shape)} is impossible: {error}") from None
    array.flags.writeable = False
    return array


def encode_all(arrays: Mapping[str, npt.ArrayLike]) -> dict[str, tensor_pb2.Tensor]:
    """Return every array as a wire tensor under its own name; raise WireError as `encode` does."""
    return {name: encode(array, name=name) for name, array in arrays.items()}


def decode_all(tensors: Mapping[str, tensor_pb2.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Return every wire tensor as an array under its own name; raise WireError as `decode` does.

    A protobuf map has no order, so the arrays come in the order of their names.
    """
    return {name: decode(tensors[name], name=name) for name in sorted(tensors)}


def _encode_strings(values: npt.NDArray[Any], name: str) -> tensor_pb2.Tensor:
    strings = [_as_bytes(value, name) for value in values.ravel().tolist()]
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_STRING, shape=values.shape, strings=strings)


def _as_bytes(value: object, name: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise WireError(f"{name}: {value!r} is no text that UTF-8 can carry: {error}") from None
    raise WireError(f"{name}: an array of objects may hold str and bytes only, but holds {type(value).__name__}")


def _decode_strings(tensor: tensor_pb2.Tensor, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    if tensor.content:
        raise WireError(f"{name}: a string tensor's values belong in strings, but {len(tensor.content)} bytes came")
    expected = math.prod(shape)
    if len(tensor.strings) != expected:
        raise WireError(f"{name}: shape {list(shape)} needs {expected} strings, but {len(tensor.strings)} came")
    flat = np.empty(expected, dtype=object)
    flat[:] = tensor.strings
    return flat


def _decode_content(tensor: tensor_pb2.Tensor, dtype_text: str, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    if tensor.strings:
        raise WireError(f"{name}: {dtype_text} values belong in content, but strings came")
    dtype = fixed_size_dtype(dtype_text)
    content = tensor.content
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise WireError(
            f"{name}: {dtype_text} of shape {list(shape)} needs {expected} bytes of content, but {len(content)} came"
        )
    flat = np.frombuffer(content, dtype=dtype)
    if dtype_text == "bool" and flat.view(np.uint8).max(initial=0) > 1:
        raise WireError(f"{name}: a bool is one byte, 0 or 1, but byte {flat.view(np.uint8).max()} came")
    return flat
