"""gRPC over HTTP/2: its message framing, its headers and trailers."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.compression import MessageTooLargeError
from understudy.service.calls.parsing import LARGE_BYTES, joined
from understudy.service.calls.served_call import REQUEST_ID_HEADER
from understudy.service.calls.status import DETAILS_KEY, Failure, UnsupportedError, status_details

_PREFIX: Final = struct.Struct(">BI")
PREFIX_BYTES: Final = _PREFIX.size

_COMPRESSED: Final = frozenset({b"gzip", b"deflate"})
ENCODINGS: Final = b"identity, deflate, gzip"
"""The supported compressions, as in the header ``grpc-accept-encoding``."""


def prefix(length: int) -> bytes:
    """Return the prefix of an uncompressed message."""
    return _PREFIX.pack(0, length)


def is_whole(body: bytes, *, max_bytes: int) -> bool:
    """Return whether a body is exactly one message that is neither compressed nor too large."""
    size = len(body) - PREFIX_BYTES
    return 0 <= size <= max_bytes and _PREFIX.unpack_from(body) == (0, size)


class Message(NamedTuple):
    """The bytes of a message as they came, and whether they are compressed."""

    data: bytes
    is_compressed: bool


class Unframer:
    """Splits a body into messages.

    Args:
        encoding: The header ``grpc-encoding``, if present.
        max_bytes: The largest message to accept, as it comes.

    Raises:
        UnsupportedError: The encoding is unknown.
    """

    def __init__(self, encoding: bytes | None, *, max_bytes: int) -> None:
        self._may_be_compressed = _names_compression(encoding)
        self._max_bytes = max_bytes
        self._chunks: list[bytes] = []
        self._begin = 0
        self._left = 0

    def feed(self, chunk: bytes) -> None:
        """Add the next bytes of the body."""
        if chunk:
            self._chunks.append(chunk)
            self._left += len(chunk)

    def next(self) -> Message | None:
        """Return the next message, or None if it is incomplete.

        Raises:
            InvalidInputError: It is flagged as compressed without an encoding.
            MessageTooLargeError: It exceeds ``max_bytes``.
        """
        if self._left < PREFIX_BYTES:
            return None
        if len(self._chunks[0]) < self._begin + PREFIX_BYTES:
            self._make_one_chunk()
        flag, length = _PREFIX.unpack_from(self._chunks[0], self._begin)
        if length > self._max_bytes:
            raise MessageTooLargeError("Received", length, self._max_bytes)
        if self._left < PREFIX_BYTES + length:
            return None
        if flag and not self._may_be_compressed:
            raise InvalidInputError(
                f"a message of {length} bytes is flagged as compressed, but grpc-encoding names nothing"
            )
        return Message(self._take(length), is_compressed=bool(flag))

    @property
    def has_large(self) -> bool:
        """Whether the next message is complete, and large, so that it takes long to put together."""
        return self._left > LARGE_BYTES and 0 < self.next_bytes <= self._left

    @property
    def next_bytes(self) -> int:
        """The bytes of the next message and its prefix, complete or not; 0 if they are not known yet."""
        if not self._chunks or len(self._chunks[0]) < self._begin + PREFIX_BYTES:
            return 0
        return PREFIX_BYTES + int(_PREFIX.unpack_from(self._chunks[0], self._begin)[1])

    @property
    def unread_bytes(self) -> int:
        """The bytes after the messages returned so far."""
        return self._left

    @property
    def has_more(self) -> bool:
        """Whether there are bytes after the messages returned so far."""
        return self._left > 0

    def check_end(self) -> None:
        """Raise InvalidInputError if the body ends within a message."""
        if self._left:
            raise InvalidInputError(f"the body ended within a message, {self._left} bytes after its beginning")

    def _take(self, length: int) -> bytes:
        """Remove and return a message of this length, and remove its prefix; large messages are copied once."""
        self._left -= PREFIX_BYTES + length
        if not self._left:
            first, *rest = self._chunks
            begin, self._chunks, self._begin = self._begin + PREFIX_BYTES, [], 0
            return _one((memoryview(first)[begin:], *rest), length)
        if len(self._chunks[0]) < self._begin + PREFIX_BYTES + length:
            self._make_one_chunk()
        begin = self._begin + PREFIX_BYTES
        self._begin = begin + length
        return self._chunks[0][begin : self._begin]

    def _make_one_chunk(self) -> None:
        first, *rest = self._chunks
        self._chunks = [_one((memoryview(first)[self._begin :], *rest), sum(map(len, self._chunks)))]
        self._begin = 0


def _one(chunks: Sequence[bytes | memoryview], size: int) -> bytes:
    return joined(chunks) if size > LARGE_BYTES else b"".join(chunks)


def _names_compression(encoding: bytes | None) -> bool:
    if encoding is None or encoding == b"identity":
        return False
    if encoding not in _COMPRESSED:
        raise UnsupportedError(
            f"grpc-encoding is {encoding.decode('latin-1')!r}; this server knows {ENCODINGS.decode()}"
        )
    return True


Headers = list[tuple[bytes, bytes]]

CONTENT_TYPE: Final = b"application/grpc"
_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
RESPONSE_HEADERS: Final[Headers] = [(b"content-type", CONTENT_TYPE), (b"grpc-accept-encoding", ENCODINGS)]
"""The headers of every response."""

_OK: Final = (b"grpc-status", b"0")
_TIMEOUT: Final = re.compile(rb"(\d{1,8})([HMSmun])")
_UNIT_SECONDS: Final[Mapping[bytes, float]] = {b"H": 3600, b"M": 60, b"S": 1, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_UNPRINTABLE: Final = re.compile(rb"[^ -$&-~]")


def is_grpc(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request uses gRPC."""
    return method == "POST" and headers.get(b"content-type", b"").startswith(CONTENT_TYPE)


def seconds_of(timeout: bytes) -> float:
    """Return a ``grpc-timeout`` in seconds.

    Raises:
        InvalidInputError: It is malformed.
    """
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        raise InvalidInputError(
            f"grpc-timeout is {timeout.decode('latin-1')!r}; up to eight digits and one of HMSmun were expected"
        )
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def ok_trailers(request_id: str | None = None) -> Headers:
    """Return the trailers of a successful call."""
    return [_OK] if request_id is None else [_OK, (_REQUEST_ID, request_id.encode())]


def failure_trailers(failure: Failure, request_id: str) -> Headers:
    """Return the trailers of a failed call."""
    trailers = [
        (b"grpc-status", str(int(failure.code)).encode()),
        (b"grpc-message", percent_encoded(failure.message)),
        (_REQUEST_ID, request_id.encode()),
    ]
    details = status_details(failure)
    if details is not None:
        trailers.append((DETAILS_KEY.encode(), base64.b64encode(details).rstrip(b"=")))
    return trailers


def percent_encoded(message: str) -> bytes:
    """Return a message encoded for the trailer ``grpc-message``: escape ``%`` and all but printable ASCII."""
    return _UNPRINTABLE.sub(lambda match: b"%%%02X" % ord(match[0]), message.encode())
