"""Encodes NumPy arrays as wire tensors and decodes them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from understudy.v1 import tensor_pb2
from understudy.wire.dtypes import STRING, WireError, dtype_name, fixed_size_dtype, on_the_wire

MAX_AXES = 64
"""NumPy's own limit."""

_STRING_KINDS = "OSTU"  # object, bytes, variable-width string, fixed-width string
_PIECE = 8192
_EXPECTED = "expected an array or evenly nested lists"


Contents = Mapping[bytes, memoryview]
_NO_CONTENTS: Contents = MappingProxyType({})


def encode(array: npt.ArrayLike, *, name: str = "tensor") -> tensor_pb2.Tensor:
    """Return an array as a wire tensor.

    Args:
        array: Anything NumPy converts to an array: any byte order, any strides, any rank. Text and bytes (alone, nested
            in lists, or as arrays of dtype object, ``S``, ``U`` or ``StringDType``) become byte strings, text as
            UTF-8. NumPy drops the trailing NUL bytes of ``S`` arrays; use dtype object where they matter. No value may
            be masked.
        name: What to call the tensor in errors.

    Raises:
        WireError: The array is ragged or masked, its dtype cannot be sent, or an object array holds something but text
            or bytes.
    """
    if isinstance(array, np.ma.MaskedArray) and (masked := int(np.ma.getmaskarray(array).sum())):
        raise WireError(f"{name}: {masked} of {array.size} values are masked; fill them, such as with .filled(0)")
    try:
        values = np.asarray(array)
    except (ValueError, TypeError, RuntimeError) as error:  # of NumPy, or of the library whose tensor it is
        raise WireError(f"{name}: {_EXPECTED}, but NumPy says: {error}") from error
    if values.dtype.kind in _STRING_KINDS:
        return _encode_strings(values, name)
    try:
        number, travelling = on_the_wire(values.dtype)
    except WireError as error:
        raise WireError(f"{name}: {error}") from None
    content = values.astype(travelling, copy=False).tobytes()
    return tensor_pb2.Tensor(dtype=number, shape=values.shape, content=content)


def decode(tensor: tensor_pb2.Tensor, *, name: str = "tensor", contents: Contents = _NO_CONTENTS) -> npt.NDArray[Any]:
    """Return a wire tensor as a read-only array, without copying unless it holds strings.

    Args:
        tensor: The tensor as received.
        name: What to call the tensor in errors.
        contents: The contents that stand elsewhere, by what stands for them in the tensor.

    Returns:
        An array of the tensor's shape and dtype; of dtype object, holding ``bytes``, for strings.

    Raises:
        WireError: The dtype is unknown, the shape is impossible, or the content does not fill the shape.
    """
    try:
        dtype = dtype_name(tensor.dtype)
    except WireError as error:
        raise WireError(f"{name}: {error}") from None
    if dtype == STRING:
        if tensor.content:
            raise WireError(f"{name}: a string tensor's values belong in strings, but got {len(tensor.content)} bytes")
        check_count(len(tensor.strings), tensor.shape, noun="strings", name=name)
        return from_elements(strings(tensor.strings), tensor.shape, noun="strings", name=name)
    if tensor.strings:
        raise WireError(f"{name}: {dtype} values belong in content, but got strings")
    content = tensor.content
    return from_content(contents.get(content, content) if contents else content, dtype, tensor.shape, name=name)


def from_content(
    content: bytes | memoryview, dtype: str, shape: Sequence[int], *, name: str = "tensor"
) -> npt.NDArray[Any]:
    """Return bytes as a read-only array, without copying them.

    Args:
        content: The elements in row-major order, little-endian, without padding; one byte each for bool.
        dtype: The name of a dtype other than ``string``.
        shape: The length of every axis.
        name: What to call the tensor in errors.

    Raises:
        WireError: The shape is impossible, or the content does not fill it, or holds a bool that is neither 0 nor 1.
    """
    axes = check_shape(shape, name=name)
    element = fixed_size_dtype(dtype)
    expected = math.prod(axes) * element.itemsize
    if len(content) != expected:
        raise WireError(
            f"{name}: {dtype} of shape {list(axes)} needs {expected} bytes of content, but got {len(content)}"
        )
    flat = np.frombuffer(content, dtype=element)
    if dtype == "bool" and flat.view(np.uint8).max(initial=0) > 1:
        raise WireError(f"{name}: a bool is one byte, 0 or 1, but got byte {flat.view(np.uint8).max()}")
    return _shaped(flat, axes, name)


def from_elements(
    flat: npt.NDArray[Any], shape: Sequence[int], *, noun: str = "elements", name: str = "tensor"
) -> npt.NDArray[Any]:
    """Return elements ``[n]`` in row-major order as a read-only array of the given shape, without copying them.

    Args:
        flat: The elements.
        shape: The length of every axis.
        noun: What to call the elements in errors.
        name: What to call the tensor in errors.

    Raises:
        WireError: The shape is impossible, or has a different number of elements.
    """
    axes = check_count(len(flat), shape, noun=noun, name=name)
    array = _shaped(flat, axes, name)
    array.flags.writeable = False
    return array


def check_count(count: int, shape: Sequence[int], *, noun: str = "elements", name: str = "tensor") -> tuple[int, ...]:
    """Return a shape as a tuple after checking its number of elements; for callers that have not built them yet.

    Raises:
        WireError: The shape is impossible, or has a different number of elements.
    """
    axes = check_shape(shape, name=name)
    expected = math.prod(axes)
    if count != expected:
        raise WireError(f"{name}: shape {list(axes)} needs {expected} {noun}, but got {count}")
    return axes


def check_shape(shape: Sequence[int], *, name: str = "tensor") -> tuple[int, ...]:
    """Return a shape as a tuple.

    Raises:
        WireError: The shape is impossible: a length is negative, or there are too many axes.
    """
    if len(shape) > MAX_AXES:
        raise WireError(f"{name}: a shape of {len(shape)} axes is impossible; at most {MAX_AXES} are possible")
    axes = tuple(shape)
    if axes and min(axes) < 0:
        raise WireError(f"{name}: shape {list(axes)} has a negative length; every length must be at least 0")
    return axes


def strings(values: Sequence[bytes]) -> npt.NDArray[Any]:
    """Return byte strings as an array ``[n]`` of dtype object."""
    flat = np.empty(len(values), dtype=object)
    for start in range(0, len(values), _PIECE):  # a slice is a list, which is read faster; other threads run in between
        flat[start : start + _PIECE] = values[start : start + _PIECE]
    return flat


def numbers(values: Sequence[float], dtype: str) -> npt.NDArray[Any]:
    """Return a message's repeated numbers as an array ``[n]``.

    From protobuf 7 on, NumPy converts repeated fields directly: values that do not fit wrap around without an error.
    Slices of them are lists, for which NumPy raises.

    Args:
        values: The numbers.
        dtype: The name of a dtype other than ``string``.

    Raises:
        OverflowError: A whole number does not fit the dtype.
    """
    flat = np.empty(len(values), fixed_size_dtype(dtype))
    for start in range(0, len(values), _PIECE):  # other threads run between the pieces
        flat[start : start + _PIECE] = values[start : start + _PIECE]
    return flat


def encode_all(arrays: Mapping[str, npt.ArrayLike]) -> dict[str, tensor_pb2.Tensor]:
    """Return every array as a wire tensor under its own name; raise WireError as `encode` does."""
    return {name: encode(array, name=name) for name, array in arrays.items()}


def decode_all(
    tensors: Mapping[str, tensor_pb2.Tensor], contents: Contents = _NO_CONTENTS
) -> dict[str, npt.NDArray[Any]]:
    """Return every wire tensor as an array under its own name; the rest as for `decode`.

    A protobuf map has no order, so the arrays come in the order of their names.
    """
    return {name: decode(tensors[name], name=name, contents=contents) for name in sorted(tensors)}


def _encode_strings(values: npt.NDArray[Any], name: str) -> tensor_pb2.Tensor:
    if values.dtype == object and not values.ndim and not isinstance(value := values.item(), bytes | str):
        raise WireError(f"{name}: {_EXPECTED}, but got a {type(value).__name__}; make a dense array of it")
    strings = [_as_bytes(value, name) for value in values.ravel().tolist()]
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_STRING, shape=values.shape, strings=strings)


def _as_bytes(value: object, name: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise WireError(f"{name}: {value!r} cannot be encoded as UTF-8: {error}") from None
    raise WireError(
        f"{name}: an array of objects may hold str and bytes only, but holds {type(value).__name__}; give numbers an "
        "array of their dtype, and replace missing values"
    )


def _shaped(flat: npt.NDArray[Any], shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    try:
        array = flat.reshape(shape)
    except ValueError as error:
        raise WireError(f"{name}: shape {list(shape)} is impossible: {error}") from None
    array.flags.writeable = False
    return array
