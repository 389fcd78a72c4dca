"""gRPC's message framing: a prefix of five bytes holds the compression flag and the length."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.envoy.refusals import MessageTooLargeError
from understudy.service.handlers.request_errors import UnsupportedError

_PREFIX: Final = struct.Struct(">BI")
PREFIX_BYTES: Final = _PREFIX.size

_ZLIB: Final = zlib.MAX_WBITS
_GZIP: Final = zlib.MAX_WBITS | 16
_WINDOW_BITS: Final = {b"gzip": _GZIP, b"deflate": _ZLIB}
ENCODINGS: Final = b"identity, deflate, gzip"
"""The supported compressions, as in the header ``grpc-accept-encoding``."""


def prefix(length: int) -> bytes:
    """Return the prefix of an uncompressed message."""
    return _PREFIX.pack(0, length)


def is_whole(body: bytes, *, max_bytes: int) -> bool:
    """Return whether a body is exactly one message that is neither compressed nor too large."""
    size = len(body) - PREFIX_BYTES
    return 0 <= size <= max_bytes and _PREFIX.unpack_from(body) == (0, size)


class Unframer:
    """Splits a body into messages.

    Args:
        encoding: The header ``grpc-encoding``, if present.
        max_bytes: The largest message to accept, compressed or not.

    Raises:
        UnsupportedError: The encoding is unknown.
    """

    def __init__(self, encoding: bytes | None, *, max_bytes: int) -> None:
        self._decompress = _decompressor(encoding, max_bytes)
        self._max_bytes = max_bytes
        self._chunks: list[bytes] = []
        self._begin = 0
        self._left = 0

    def feed(self, chunk: bytes) -> None:
        """Add the next bytes of the body."""
        if chunk:
            self._chunks.append(chunk)
            self._left += len(chunk)

    def next(self) -> bytes | None:
        """Return the next message, or None if it is incomplete.

        Raises:
            InvalidInputError: It cannot be decompressed.
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
        message = self._take(length)
        return self._decompress(message) if flag else message

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
            return b"".join((memoryview(first)[begin:], *rest))
        if len(self._chunks[0]) < self._begin + PREFIX_BYTES + length:
            self._make_one_chunk()
        begin = self._begin + PREFIX_BYTES
        self._begin = begin + length
        return self._chunks[0][begin : self._begin]

    def _make_one_chunk(self) -> None:
        first, *rest = self._chunks
        self._chunks, self._begin = [b"".join((memoryview(first)[self._begin :], *rest))], 0


def _decompressor(encoding: bytes | None, max_bytes: int) -> Callable[[bytes], bytes]:
    if encoding is None or encoding == b"identity":
        return _refuse
    window_bits = _WINDOW_BITS.get(encoding)
    if window_bits is None:
        raise UnsupportedError(
            f"grpc-encoding is {encoding.decode('latin-1')!r}; this server knows {ENCODINGS.decode()}"
        )

    def decompress(message: bytes) -> bytes:
        inflating = zlib.decompressobj(window_bits)
        try:
            data = inflating.decompress(message, max_bytes + 1)
        except zlib.error as error:
            raise InvalidInputError(f"a message is not compressed as grpc-encoding says: {error}") from error
        if len(data) > max_bytes:
            raise MessageTooLargeError("Received", len(data), max_bytes)
        if not inflating.eof:
            raise InvalidInputError("a message is not compressed as grpc-encoding says: it ends too early")
        return data

    return decompress


def _refuse(message: bytes) -> bytes:
    raise InvalidInputError(
        f"a message of {len(message)} bytes is flagged as compressed, but grpc-encoding names nothing"
    )
