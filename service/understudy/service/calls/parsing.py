"""Parses request messages whose cost is bounded beforehand.

protobuf parses on the event loop and holds the interpreter lock. The time and memory that it takes depend on how many
parts a message has, not on its bytes: 4 MB of empty strings take a hundred times as long as 4 MB of one tensor.
"""

from __future__ import annotations

import functools
import io
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from understudy.evaluator.evaluator_errors import InvalidInputError

LENGTH_DELIMITED: Final = 2
"""The wire type of bytes, text, nested messages and packed numbers."""
_VARINT: Final = 0
_FIXED_BYTES: Final = {1: 8, 5: 4}

MAX_COST: Final = 65_536
"""The limit of what a message costs. A unit is about 0.15 µs of checking, parsing and handling, and 16 bytes."""
_MESSAGE_COST: Final = 16
"""The cost of a nested message."""
_FIELD_COST: Final = 8
"""The cost of another field; of bytes or text that follow a field with the same number it is 1."""
_BYTES_PER_COST: Final = 16
"""As many bytes of packed numbers of variable length, or of text, cost 1: text is decoded, and quoted in errors."""
UNCHECKED_BYTES: Final = 16_384
"""Shorter messages cannot cost much."""

_LONGEST_VARINT: Final = 10
_CONTINUES: Final = 0x80
_FIXED_TYPES: Final = frozenset(
    {
        *(FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED32),
        *(FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_SFIXED64),
        FieldDescriptor.TYPE_BYTES,
    }
)


class MalformedError(Exception):
    """The bytes are not a message, or use an unsupported wire type."""


def parse(message_type: Any, data: bytes, begin: int = 0) -> Any:
    """Return the message in ``data[begin:]``.

    Args:
        message_type: The class of the message.
        data: Its bytes.
        begin: Where they begin.

    Raises:
        DecodeError: The bytes cannot be parsed.
        InvalidInputError: The message has too many parts.
    """
    if len(data) - begin > UNCHECKED_BYTES:
        try:
            check_parts(message_type.DESCRIPTOR, data, begin)
        except MalformedError as error:
            raise DecodeError(str(error)) from None
    return message_type.FromString(data[begin:])


LARGE_BYTES: Final = 1 << 22
"""A copy of more bytes than this, while the interpreter lock is held, would hold other calls up."""
_LARGE_FIELD_BYTES: Final = 1 << 16
_MOST_FIELDS: Final = 4096
_CONTENTS: Final = frozenset(
    {
        "understudy.v1.Tensor.content",
        "inference.ModelInferRequest.raw_input_contents",
        "tensorflow.TensorProto.tensor_content",
    }
)
"""The fields of bytes that `parse_zero_copy` leaves out."""


class ZeroCopyMessage(NamedTuple):
    """A message whose large contents were not copied.

    Attributes:
        message: The message, with a placeholder for each.
        contents: The contents by placeholder. No caller can guess one.
    """

    message: Any
    contents: Mapping[bytes, memoryview]


def parse_zero_copy(message_type: Any, data: bytes, begin: int = 0) -> ZeroCopyMessage:
    """Return the message in ``data[begin:]``; see `parse`. Large contents of tensors are views of the data."""
    if len(data) - begin <= LARGE_BYTES:
        return ZeroCopyMessage(parse(message_type, data, begin), {})
    try:
        check_parts(message_type.DESCRIPTOR, data, begin)
        cutter = _Cutter(data)
        pieces = cutter.cut(message_type.DESCRIPTOR, begin, len(data))
    except MalformedError as error:
        raise DecodeError(str(error)) from None
    return ZeroCopyMessage(message_type.FromString(b"".join(pieces)), cutter.contents)


class _Cutter:
    """Replaces the large contents in one message by placeholders."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._view = memoryview(data)
        self._secret = secrets.token_bytes(16)
        self._fields_left = _MOST_FIELDS
        self.contents: dict[bytes, memoryview] = {}

    def cut(self, descriptor: Descriptor, at: int, end: int) -> list[bytes | memoryview]:
        """Return the pieces of the message in a span; from the most fields on, all that is left is one piece."""
        pieces: list[bytes | memoryview] = []
        kept = at
        while at < end and self._fields_left:
            self._fields_left -= 1
            tag, length_at = varint(self._data, at, end)
            begin, after = _span(tag & 7, self._data, length_at, end)
            if after - begin > _LARGE_FIELD_BYTES and tag & 7 == LENGTH_DELIMITED:
                field = descriptor.fields_by_number.get(tag >> 3)
                instead = self._instead(field, begin, after)
                if field is None or instead is not None:  # nothing reads unknown fields
                    pieces.append(self._view[kept:at])
                    kept = after
                if instead is not None:
                    pieces += [varint_bytes(tag), varint_bytes(sum(map(len, instead))), *instead]
            at = after
        pieces.append(self._view[kept:end])
        return pieces

    def _instead(self, field: FieldDescriptor | None, begin: int, end: int) -> list[bytes | memoryview] | None:
        """Return what replaces the contents of a field; None to keep them."""
        if field is None:
            return None
        if field.message_type is not None:
            return self.cut(field.message_type, begin, end)
        if field.full_name not in _CONTENTS:
            return None
        placeholder = self._secret + begin.to_bytes(8, "little")
        self.contents[placeholder] = self._view[begin:end]
        return [placeholder]


def nested(number: int, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the pieces of a field of bytes, text or a message."""
    return [varint_bytes(number << 3 | LENGTH_DELIMITED), varint_bytes(sum(map(len, pieces))), *pieces]


_COPIED_AT_ONCE: Final = 1 << 20


def joined(pieces: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Return the pieces as one; on a thread of its own, it holds other threads up for some milliseconds at a time.

    `bytes.join` keeps the interpreter lock while it copies, unless it joins nothing but bytes. The buffer has its size
    from the beginning: one that grows is moved again and again by Envoy's allocator, which keeps the places.
    """
    whole = io.BytesIO(bytes(sum(map(len, pieces))))
    for piece in pieces:
        view = memoryview(piece)
        for begin in range(0, len(view), _COPIED_AT_ONCE):
            whole.write(view[begin : begin + _COPIED_AT_ONCE])
    return whole.getvalue()


def check_parts(descriptor: Descriptor, data: bytes, begin: int = 0) -> None:
    """Check what a message costs, without parsing it. Takes at most about 10 ms.

    Raises:
        InvalidInputError: It has too many parts.
        MalformedError: The bytes are not a message.
    """
    cost = 0
    waiting: list[tuple[int, int, Descriptor]] = [(begin, len(data), descriptor)]
    while waiting:
        at, end, descriptor = waiting.pop()
        layout = _layout(descriptor)
        while at < end:
            tag, at = varint(data, at, end)
            start, at = _span(tag & 7, data, at, end)
            kind = layout.get(tag)
            if kind is None or kind is _COSTS_BY_SIZE:
                cost += _FIELD_COST + (0 if kind is None else (at - start) // _BYTES_PER_COST)
            else:
                cost += _MESSAGE_COST
                waiting.append((start, at, kind))
            if kind is None and tag & 7 == LENGTH_DELIMITED and tag < _CONTINUES:
                passed, at = _pass_equal_tags(tag, data, at, end, MAX_COST - cost)
                cost += passed
            if cost > MAX_COST:
                raise InvalidInputError(
                    "the request has too many fields, nested messages or packed numbers, or too much text, for one "
                    "message; send fewer elements at once, or tensors as raw content"
                )


class Field(NamedTuple):
    """One field of a serialized message, and where its contents are."""

    number: int
    wire_type: int
    begin: int
    end: int


def fields(data: bytes, at: int, end: int) -> Iterator[Field]:
    """Yield the fields of a serialized message; raise MalformedError where it is not one."""
    while at < end:
        tag, at = varint(data, at, end)
        begin, at = _span(tag & 7, data, at, end)
        yield Field(tag >> 3, tag & 7, begin, at)


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
            (found,) = (field for field in fields(data, begin, end) if field.number == number)
            if found.wire_type != LENGTH_DELIMITED:
                return None
            begin, end = found.begin, found.end
    except (MalformedError, ValueError):
        return None
    return begin, end


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint and its end; raise MalformedError if it is too long, or cut short."""
    if at < end and data[at] < _CONTINUES:
        return data[at], at + 1
    value = 0
    for index, byte in enumerate(data[at : min(end, at + _LONGEST_VARINT)]):
        value |= (byte & 0x7F) << 7 * index
        if byte < _CONTINUES:
            return value, at + index + 1
    raise MalformedError("a number of variable length does not end")


def varint_bytes(value: int) -> bytes:
    """Return a number of at least 0 as a varint; the inverse of `varint`."""
    encoded = bytearray()
    while value >= _CONTINUES:
        encoded.append(value & 0x7F | _CONTINUES)
        value >>= 7
    return bytes([*encoded, value])


def _span(wire_type: int, data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where the contents of a field begin and end, after its tag."""
    if wire_type == LENGTH_DELIMITED:
        length, start = varint(data, at, end)
        at = start + length
    elif wire_type == _VARINT:
        start, (_, at) = at, varint(data, at, end)
    elif wire_type in _FIXED_BYTES:
        start, at = at, at + _FIXED_BYTES[wire_type]
    else:
        raise MalformedError(f"wire type {wire_type} is not used by proto3")
    if at > end:
        raise MalformedError(f"a field ends {at - end} bytes after its message")
    return start, at


def _pass_equal_tags(tag: int, data: bytes, at: int, end: int, most: int) -> tuple[int, int]:
    """Pass fields with a tag of one byte and lengths of one or two; return how many, and the end of the last."""
    for passed in range(most + 1):
        if at + 2 >= end or data[at] != tag:
            return passed, at
        length, start = data[at + 1], at + 2
        if length >= _CONTINUES:
            length, start = length & 0x7F | data[start] << 7, start + 1
            if length >= _CONTINUES << 7:
                return passed, at
        if start + length > end:
            return passed, at
        at = start + length
    return most + 1, at


_COSTS_BY_SIZE: Final = object()
"""Marks a field of packed numbers of variable length, or of text."""


@functools.cache
def _layout(descriptor: Descriptor) -> Mapping[int, Any]:
    """Return the descriptors of nested messages, and which fields are packed numbers or text, by tag."""
    layout: dict[int, Any] = {}
    for field in descriptor.fields:
        tag = field.number << 3 | LENGTH_DELIMITED
        if field.message_type is not None:
            layout[tag] = field.message_type
        elif field.type == FieldDescriptor.TYPE_STRING or (field.is_repeated and field.type not in _FIXED_TYPES):
            layout[tag] = _COSTS_BY_SIZE
    return layout
