"""JSON values: large texts read without blocking other threads, fields, arrays of elements, and messages."""

from __future__ import annotations

import itertools
import json
import json.decoder
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array
from understudy.service.handlers.inference import BOOL, BYTES, Parameters, dtype_of
from understudy.wire import WireError, check_count, check_shape, fixed_size_dtype, from_elements, numbers, strings

MAX_BYTES_AT_ONCE: Final = 32_768
"""JSON up to this size is parsed at once, which takes a few milliseconds at most."""
MAX_CONTAINERS: Final = 65_536
"""The limit of arrays and objects in one body, since the garbage collector visits each of them repeatedly."""

MAX_MEMBERS: Final = 16_384
"""The limit of the members of all objects in one large body."""

MAX_TEXT_CHARACTERS: Final = 65_536
"""The limit of a name or another text that is no data."""

_PIECE: Final = 8192
_COUNTED: Final = 1 << 20
_ELEMENTS: Final = re.compile(r"""(?:\s*+(?:"[^"\\]{0,4096}+"|[^][{}",\\\s]{1,4096}+)\s*+,){1,4096}+""")
"""Elements of an array that are neither arrays nor objects, nor have escapes, each with its comma."""

_PYTHON: Final[Any] = json.decoder  # the stubs lack its functions


class _PiecewiseDecoder(json.JSONDecoder):
    """Accepts what `json.loads` accepts, but parses in pieces, so that other threads run in between."""

    scan_once: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._scan_scalar = self.scan_once  # in C
        self.scan_once = self._scan
        self._members = 0

    def _scan(self, source: str, at: int) -> Any:
        opening = source[at : at + 1]
        if opening == "[":
            return self._array(source, at + 1)
        if opening == "{":
            return _PYTHON.JSONObject((source, at + 1), self.strict, self._scan_member, None, None)
        return self._scan_scalar(source, at)

    def _scan_member(self, source: str, at: int) -> Any:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise InvalidInputError(
                f"the JSON has more than {MAX_MEMBERS} members of objects; send data as arrays, or as binary data"
            )
        return self._scan(source, at)

    def _array(self, source: str, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        while (found := _ELEMENTS.match(source, at)) is not None:
            try:
                values += json.loads(f"[{source[at : found.end() - 1]}]")
            except ValueError:
                break  # the code below finds the error's place
            at = found.end()
        rest, end = _PYTHON.JSONArray((source, at), self._scan)
        if values and not rest:
            raise json.JSONDecodeError("Expecting value", source, at)
        values += rest
        return values, end


def read_json(content: bytes) -> Any:
    """Parse bytes as JSON.

    Raises:
        InvalidInputError: They are not JSON, or hold too many arrays, objects and members.
    """
    is_large = len(content) > MAX_BYTES_AT_ONCE
    if is_large:
        _check_containers(content)
    try:
        return json.loads(content, cls=_PiecewiseDecoder if is_large else None)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from None


def parse_json(content: bytes) -> Mapping[str, Any]:
    """Parse bytes as a JSON object; return an empty one for no bytes.

    Raises:
        InvalidInputError: They are not a JSON object.
    """
    value = read_json(content or b"{}")
    if not isinstance(value, dict):
        raise InvalidInputError("the body is JSON, but not an object; an object was expected")
    return value


def let_go(value: Any) -> None:
    """Release the long arrays in a value, piece by piece."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        elements = container.values() if isinstance(container, dict) else container
        waiting.extend(element for element in elements if isinstance(element, dict | list))
        if isinstance(container, list):
            while len(container) > _PIECE:
                del container[-_PIECE:]


def _check_containers(content: bytes) -> None:
    containers = 0
    for start in range(0, len(content), _COUNTED):
        containers += sum(content.count(opening, start, start + _COUNTED) for opening in (b"[", b"{"))
        if containers > MAX_CONTAINERS:
            raise InvalidInputError(
                f"the JSON has more than {MAX_CONTAINERS} arrays and objects; send data flat, or as binary data"
            )


_Object = Mapping[str, Any]
_LARGEST_LENGTH = 2**63 - 1


def text(owner: _Object, field: str, what: str) -> str:
    """Return a required field that must be text; raise InvalidInputError if it is not, or is too long."""
    value = owner.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{what}: {field} is {_short(value)}; text was expected")
    check_length(value, f"{what}: {field}")
    return value


def optional_text(owner: _Object, field: str, what: str) -> str:
    """Return an optional field that must be text; raise InvalidInputError if it is not, or is too long."""
    value = owner.get(field, "")
    if not isinstance(value, str):
        raise InvalidInputError(f"{what}: {field} is {_short(value)}; text was expected")
    check_length(value, f"{what}: {field}")
    return value


def check_length(value: str, what: str) -> None:
    """Raise InvalidInputError if text is so long that errors which quote it would hold other calls up."""
    if len(value) > MAX_TEXT_CHARACTERS:
        raise InvalidInputError(f"{what} has {len(value)} characters; {MAX_TEXT_CHARACTERS} is the limit")


def integers(owner: _Object, field: str, what: str) -> Sequence[int]:
    """Return a field that must be an array of 64-bit whole numbers; raise InvalidInputError if it is not."""
    value = owner.get(field)
    if not isinstance(value, list) or not all(type(number) is int and number <= _LARGEST_LENGTH for number in value):
        raise InvalidInputError(f"{what}: {field} is {_short(value)}; an array of whole numbers was expected")
    return value


def items(owner: _Object, field: str, what: str) -> Sequence[_Object]:
    """Return an optional field that must be an array of objects; raise InvalidInputError if it is not."""
    value = owner.get(field, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidInputError(f"{what}: {field} is {_short(value)}; an array of objects was expected")
    return value


def parameters(owner: _Object, what: str) -> Parameters:
    """Return the parameters of an object; raise InvalidInputError unless they are an object of simple values."""
    value = owner.get("parameters", {})
    if not isinstance(value, dict) or not all(isinstance(each, bool | int | float | str) for each in value.values()):
        raise InvalidInputError(
            f"{what}: parameters are {_short(value)}; an object of numbers, text, true and false was expected"
        )
    return value


def _short(value: Any) -> str:
    shown = reprlib.repr(value)
    return shown if len(shown) < 100 else f"{shown[:100]}…"  # noqa: PLR2004 - enough to match it


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


def encode_data(array: Array, *, name: str) -> str:
    """Return the elements as a flat JSON array; the inverse of `decode_data`.

    Raises:
        InvalidInputError: Bytes are not UTF-8 text, as JSON requires.
    """
    flat = array.ravel()
    pieces = (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))
    return f"[{','.join(compact(_values(piece, name))[1:-1] for piece in pieces)}]"


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _values(flat: Array, name: str) -> Any:
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
            return numbers(elements, dtype)
        return _rounded(numbers(elements, "float64"), element, datatype, name)
    except OverflowError as error:
        raise WireError(f"{name}: an element does not fit {datatype}: {error}") from None


def _rounded(values: Array, element: np.dtype[Any], datatype: str, name: str) -> Array:
    with np.errstate(over="ignore"):
        rounded = values.astype(element)
    if bool(np.any(np.isinf(rounded) & np.isfinite(values))):
        raise WireError(f"{name}: an element does not fit {datatype}: it is too large")
    return rounded


def _check_kinds(elements: list[Any], allowed: set[type], expected: str, name: str) -> None:
    for start in range(0, len(elements), _PIECE):
        piece = elements[start : start + _PIECE]
        for kind in set(map(type, piece)) - allowed:
            foreign = next(element for element in piece if type(element) is kind)
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


def as_json(message: Message) -> dict[str, Any]:
    """Return every field of a message under its own name, numbers as numbers.

    `google.protobuf.json_format` would turn 64-bit numbers into text, unlike the protocol.
    """
    fields = [field for field in message.DESCRIPTOR.fields if not field.has_presence or message.HasField(field.name)]
    return {field.name: _value(field, getattr(message, field.name)) for field in fields}


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_value = field.message_type.fields_by_name["value"]
        return {str(key): _single(of_value, each) for key, each in value.items()}
    return [_single(field, each) for each in value] if field.is_repeated else _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name
