"""Parts of pages, each rendered once for all browsers that show it, and the events that send them.

An event is compressed once, too. A stream in gzip of its own for each reader would hold a window of what was sent, and
compress the same events again. Here an event is a run of deflate blocks that ends at a byte and refers to nothing
before it, so it can be put into any stream.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import Final, NamedTuple

from understudy.service.page.change_feed import ChangeFeed

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


MAX_RENDERED: Final = 64
"""How many rendered parts are kept."""

_BEGIN: Final = stored(b"retry: 3000\n\n")
_END: Final = stored(b"retry: 100\n\n")
"""Lets the browser return at once to a stream that ended by its age."""
_KEEP_ALIVE: Final = stored(b": open\n\n")
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a page.

    Attributes:
        name: Its name, which is that of its events and of what the feed looks at.
        key: What tells it apart from other parts, of whatever page and caller.
        render: Returns its HTML. Blocks.
    """

    name: str
    key: tuple[object, ...]
    render: Callable[[], str]


@dataclass(frozen=True, kw_only=True)
class RenderedPart:
    """A part as it is now.

    Attributes:
        html: Its HTML.
        digest: Tells its states apart.
        event: The server-sent event with it.
    """

    html: str
    digest: str
    event: Chunk


class SharedParts:
    """Renders parts, one at a time, and once for all who ask for the same. Belongs to the event loop's thread.

    Args:
        feed: Knows when a part has changed.
        executor: Renders.
    """

    def __init__(self, feed: ChangeFeed, executor: Executor) -> None:
        self._feed = feed
        self._executor = executor
        self._rendering = asyncio.Lock()
        self._rendered: dict[tuple[object, ...], tuple[float, int, RenderedPart]] = {}

    async def get(self, part: Part, *, fresh_seconds: float = math.inf) -> RenderedPart:
        """Return a part, rendered after its last known change, and no longer ago than this."""
        found = self._fresh(part, fresh_seconds)
        if found is not None:
            return found
        async with self._rendering:
            found = self._fresh(part, fresh_seconds)
            if found is None:
                began, generation = monotonic(), self._feed.generation(part.name)
                found = await asyncio.get_running_loop().run_in_executor(self._executor, _rendered, part)
                self._rendered.pop(part.key, None)
                self._rendered[part.key] = (began, generation, found)
                if len(self._rendered) > MAX_RENDERED:
                    del self._rendered[next(iter(self._rendered))]
            return found

    def _fresh(self, part: Part, fresh_seconds: float) -> RenderedPart | None:
        began, generation, found = self._rendered.get(part.key, (0.0, -1, None))
        is_fresh = generation == self._feed.generation(part.name) and monotonic() - began < fresh_seconds
        return found if is_fresh else None

    async def events(self, parts: Sequence[Part], seen: str, stream: PlainStream) -> AsyncIterator[bytes]:
        """Yield events with the parts of a page that differ from what it shows, until the feed ends.

        A page that reads slowly skips states: nothing is rendered for it before it has read what was sent.

        Args:
            parts: The parts of the page.
            seen: What the page shows, as `state_of` said or the id of the last event.
            stream: Codes the events.
        """
        shown = seen.split(".")
        if len(shown) != len(parts):
            shown = [""] * len(parts)
        yield stream.begin() + stream.add(_BEGIN)
        async for may_have_changed in self._feed.changes():
            if not may_have_changed:
                yield stream.add(_KEEP_ALIVE)
                continue
            now = [await self.get(part) for part in parts]
            news = [part.event for part, digest in zip(now, shown, strict=True) if part.digest != digest]
            if news:
                shown = [part.digest for part in now]
                yield b"".join(map(stream.add, [*news, stored(f"id: {state_of(now)}\n\n".encode())]))
        yield (b"" if self._feed.is_draining else stream.add(_END)) + stream.end()


def state_of(parts: Sequence[RenderedPart]) -> str:
    """Return what tells the states of a page apart."""
    return ".".join(part.digest for part in parts)


def _rendered(part: Part) -> RenderedPart:
    html = part.render()
    lines = html.encode().splitlines() or [b""]
    data = b"".join(b"data: " + line + b"\n" for line in lines)
    event = b"event: " + part.name.encode() + b"\n" + data + b"\n"
    digest = blake2b(html.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return RenderedPart(html=html, digest=digest, event=compressed(event))
