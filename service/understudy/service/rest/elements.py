"""NumPy arrays as JSON arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array
from understudy.service.handlers.oip.datatypes import BOOL, BYTES, dtype_of
from understudy.wire import WireError, check_count, check_shape, fixed_size_dtype, from_elements, strings


def decode_data(data: Any, datatype: str, shape: Sequence[int], *, name: str) -> Array:
    """Return the array that a JSON array holds: flat or nested, in row-major order.

    BOOL elements are true and false, BYTES elements are text; all others are numbers.

    Raises:
        WireError: The datatype is unknown, an element has another type or is out of range, or the elements do not fill
            the shape.
    """
    dtype = dtype_of(datatype, name)
    if not isinstance(data, list):
        raise WireError(f"{name}: data is {_kind(data)}; an array of elements was expected")
    expected = math.prod(check_shape(shape, name=name))
    elements = list(itertools.islice(_flattened(data), expected + 1))
    if len(elements) > expected:
        raise WireError(f"{name}: shape {list(shape)} needs {expected} elements in data, but got more")
    check_count(len(elements), shape, noun="elements in data", name=name)
    flat = _texts(elements, name) if datatype == BYTES else _numbers(elements, datatype, dtype, name)
    return from_elements(flat, shape, noun="elements in data", name=name)


def encode_data(array: Array, *, name: str) -> list[Any]:
    """Return the elements as a flat list; the inverse of `decode_data`.

    Raises:
        InvalidInputError: Bytes are not UTF-8 text, as JSON requires.
    """
    flat = array.ravel()
    if flat.dtype.kind != "O":
        return (flat.astype(np.float64) if flat.dtype.name == "bfloat16" else flat).tolist()
    try:
        return [element.decode() for element in flat]
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"output {name!r} has bytes that are not UTF-8 text; ask for it as binary data: {error}"
        ) from None


def _flattened(data: list[Any]) -> Iterator[Any]:
    """Yield the elements of lists nested to any depth."""
    waiting = [iter(data)]
    while waiting:
        for element in waiting[-1]:
            if isinstance(element, list):
                waiting.append(iter(element))
                break
            yield element
        else:
            waiting.pop()


def _texts(elements: list[Any], name: str) -> Array:
    _check_kinds(elements, {str}, "text", name)
    try:
        return strings([element.encode() for element in elements])
    except UnicodeEncodeError as error:
        raise WireError(f"{name}: an element cannot be encoded as UTF-8: {error}") from None


def _numbers(elements: list[Any], datatype: str, dtype: str, name: str) -> Array:
    element = fixed_size_dtype(dtype)
    if datatype == BOOL:
        _check_kinds(elements, {bool}, "true or false", name)
    elif element.kind in "iu":
        _check_kinds(elements, {int}, "whole numbers", name)
    else:
        _check_kinds(elements, {int, float}, "numbers", name)
    try:
        if element.kind in "biu":
            return np.array(elements, element)
        return _rounded(np.array(elements, np.float64), element, datatype, name)
    except OverflowError as error:
        raise WireError(f"{name}: an element does not fit {datatype}: {error}") from None


def _rounded(values: Array, element: np.dtype[Any], datatype: str, name: str) -> Array:
    with np.errstate(over="ignore"):
        rounded = values.astype(element)
    if bool(np.any(np.isinf(rounded) & np.isfinite(values))):
        raise WireError(f"{name}: an element does not fit {datatype}: it is too large")
    return rounded


def _check_kinds(elements: list[Any], allowed: set[type], expected: str, name: str) -> None:
    for kind in set(map(type, elements)) - allowed:
        foreign = next(element for element in elements if type(element) is kind)
        raise WireError(f"{name}: data holds {_kind(foreign)}; {expected} was expected")


def _kind(value: Any) -> str:
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")
