"""Finds one field of a serialized message by walking protobuf's wire format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

_VARINT: Final = 0
_FIXED_64: Final = 1
_LENGTH_DELIMITED: Final = 2
_FIXED_32: Final = 5
_FIXED_BYTES: Final = {_FIXED_64: 8, _FIXED_32: 4}
_LONGEST_VARINT: Final = 10


class _Field(NamedTuple):
    number: int
    wire_type: int
    begin: int
    end: int


class _MalformedError(Exception):
    """The bytes are not a message, or use an unsupported wire type."""


def span_of(data: bytes, path: Sequence[int]) -> tuple[int, int] | None:
    """Return the span of a field's contents, or None unless it and each enclosing message occur exactly once.

    This proves that replacing the span with as many other bytes changes the value of that field and nothing else: no
    other field overrides it, and it contains no structure.

    Args:
        data: A serialized message.
        path: The field numbers of the nested messages, from the outermost; the last is that of a field of bytes.
    """
    begin, end = 0, len(data)
    try:
        for number in path:
            (found,) = (field for field in _fields(data, begin, end) if field.number == number)
            if found.wire_type != _LENGTH_DELIMITED:
                return None
            begin, end = found.begin, found.end
    except (_MalformedError, ValueError):
        return None
    return begin, end


def _fields(data: bytes, at: int, end: int) -> Iterator[_Field]:
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire_type = tag >> 3, tag & 7
        begin = at
        if wire_type == _VARINT:
            _, at = _varint(data, at, end)
        elif wire_type == _LENGTH_DELIMITED:
            length, begin = _varint(data, at, end)
            at = begin + length
        elif wire_type in _FIXED_BYTES:
            at += _FIXED_BYTES[wire_type]
        else:
            raise _MalformedError
        if at > end:
            raise _MalformedError
        yield _Field(number, wire_type, begin, at)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint and its end."""
    value = 0
    for index, byte in enumerate(data[at : min(end, at + _LONGEST_VARINT)]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            return value, at + index + 1
    raise _MalformedError
