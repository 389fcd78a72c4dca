"""An event stream in gzip, of which each event is compressed once for all who read it.

A stream of its own for each reader would hold a window of what was sent, and compress the same events again. Here an
event is a run of deflate blocks that ends at a byte and refers to nothing before it, so it can be put into any stream.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

_HEADER: Final = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
_LAST_BLOCK: Final = b"\x03\0"
_LEVEL: Final = 5
_MAX_STORED: Final = 0xFFFF


class Chunk(NamedTuple):
    """Bytes of a stream, and the deflate blocks that hold them."""

    plain: bytes
    deflated: bytes


def compressed(plain: bytes) -> Chunk:
    """Return compressed bytes."""
    compressor = zlib.compressobj(_LEVEL, wbits=-zlib.MAX_WBITS)
    return Chunk(plain, compressor.compress(plain) + compressor.flush(zlib.Z_SYNC_FLUSH))


def stored(plain: bytes) -> Chunk:
    """Return bytes as they are, at most 64 KiB, for what is too short to be compressed."""
    size = len(plain)
    return Chunk(plain, b"\0" + size.to_bytes(2, "little") + (size ^ _MAX_STORED).to_bytes(2, "little") + plain)


class PlainStream:
    """Passes chunks on."""

    def begin(self) -> bytes:
        """Return what comes before the first chunk."""
        return b""

    def add(self, chunk: Chunk) -> bytes:
        """Return the next chunk as it is sent."""
        return chunk.plain

    def end(self) -> bytes:
        """Return what comes after the last chunk."""
        return b""


class GzipStream(PlainStream):
    """Puts chunks into one member of gzip. Holds two numbers. Not thread-safe."""

    def __init__(self) -> None:
        self._checksum = 0
        self._size = 0

    def begin(self) -> bytes:
        """Return the header."""
        return _HEADER

    def add(self, chunk: Chunk) -> bytes:
        """Return the next chunk as it is sent."""
        self._checksum = zlib.crc32(chunk.plain, self._checksum)
        self._size = (self._size + len(chunk.plain)) & 0xFFFF_FFFF
        return chunk.deflated

    def end(self) -> bytes:
        """Return the trailer."""
        return _LAST_BLOCK + self._checksum.to_bytes(4, "little") + self._size.to_bytes(4, "little")
