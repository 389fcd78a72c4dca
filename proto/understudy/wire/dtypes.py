"""Element types on the wire: their names, numbers and NumPy dtypes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from understudy.v1 import tensor_pb2

STRING = "string"
BFLOAT16 = "bfloat16"

_PREFIX = "DATA_TYPE_"
_DATA_TYPES: dict[str, tensor_pb2.DataType.ValueType] = {
    name.removeprefix(_PREFIX).lower(): number
    for name, number in tensor_pb2.DataType.items()
    if number != tensor_pb2.DATA_TYPE_UNSPECIFIED
}
_NAMES: dict[int, str] = {number: name for name, number in _DATA_TYPES.items()}


class WireError(ValueError):
    """A value is not a valid tensor of this protocol. The text names the tensor, the value and what was expected."""


def data_type(name: str) -> tensor_pb2.DataType.ValueType:
    """Return the DataType of a dtype's name: NumPy's, ``bfloat16``, or ``string`` for byte strings.

    Raises:
        WireError: The wire has no such type.
    """
    try:
        return _DATA_TYPES[name]
    except KeyError:
        raise WireError(f"dtype {name} cannot be sent; expected one of {', '.join(_DATA_TYPES)}") from None


def dtype_name(number: int) -> str:
    """Return the name of a DataType number; the inverse of `data_type`.

    Raises:
        WireError: The number is unknown to this version.
    """
    try:
        return _NAMES[number]
    except KeyError:
        raise WireError(f"data type number {number} is unknown; expected one of {_numbered_names()}") from None


@functools.cache
def fixed_size_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype of a name other than ``string``."""
    if name == BFLOAT16:
        import ml_dtypes  # imported only when a bfloat16 tensor is used

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
    return dtype


@functools.lru_cache(maxsize=64)  # NumPy builds the name of a dtype on each access
def on_the_wire(dtype: np.dtype[Any]) -> tuple[tensor_pb2.DataType.ValueType, np.dtype[Any]]:
    """Return the DataType of a dtype other than strings, and the little-endian dtype to encode it as.

    Raises:
        WireError: The wire has no such type.
    """
    number = data_type(dtype.name)
    return number, fixed_size_dtype(dtype.name)


def _numbered_names() -> str:
    return ", ".join(f"{number} ({name})" for name, number in _DATA_TYPES.items())
