"""Finds one field of a serialized message by walking its bytes as protobuf's wire format has them."""

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
    """The bytes are no message, or hold what this walk does not know."""


def span_of(data: bytes, path: Sequence[int]) -> tuple[int, int] | None:
    """Return where the contents of a field begin and end, or None unless it and each message around it are there once.

    So other bytes in that place, as many, change the value of that field and nothing else: no other field overrides it,
    and nothing within it is structure.

    Args:
        data: A message.
        path: The number of a field of messages in it, then of one in that, and so on; last that of a field of bytes.
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
    """Return a number and where it ends."""
    value = 0
    for index, byte in enumerate(data[at : min(end, at + _LONGEST_VARINT)]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004 - the bit that says that more follows
            return value, at + index + 1
    raise _MalformedError
