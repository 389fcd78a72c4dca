"""The element types on the wire, by their names and as NumPy knows them."""

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
    """Something that is no tensor of this protocol. The text names the tensor, what came and what was expected."""


def data_type(name: str) -> tensor_pb2.DataType.ValueType:
    """Return the wire's number for a dtype's name: NumPy's, ``bfloat16``, or ``string`` for byte strings.

    Raises:
        WireError: The wire has no such type.
    """
    try:
        return _DATA_TYPES[name]
    except KeyError:
        raise WireError(f"dtype {name} cannot travel; expected one of {', '.join(_DATA_TYPES)}") from None


def dtype_name(number: int) -> str:
    """Return the name `data_type` takes for a number that came over the wire.

    Raises:
        WireError: The number stands for no type that this version knows.
    """
    try:
        return _NAMES[number]
    except KeyError:
        raise WireError(f"data type number {number} is unknown; expected one of {_numbered_names()}") from None


@functools.cache
def fixed_size_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype of a name other than ``string``."""
    if name == BFLOAT16:
        import ml_dtypes  # only whoever meets a bfloat16 pays for it

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
    return dtype


@functools.lru_cache(maxsize=64)  # NumPy makes the name of a dtype up each time
def on_the_wire(dtype: np.dtype[Any]) -> tuple[tensor_pb2.DataType.ValueType, np.dtype[Any]]:
    """Return the wire's number for a dtype other than strings, and the little-endian dtype that travels.

    Raises:
        WireError: The wire has no such type.
    """
    number = data_type(dtype.name)
    return number, fixed_size_dtype(dtype.name)


def _numbered_names() -> str:
    return ", ".join(f"{number} ({name})" for name, number in _DATA_TYPES.items())
