"""Decompresses request messages, never beyond the largest message."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final, Literal

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.status import CallEndedError, Code, Failure

_ZLIB_OR_GZIP: Final = zlib.MAX_WBITS | 32
_BRIEF_BYTES: Final = 1024
"""The largest compressed message that is decompressed on the event loop: it becomes about 1 MiB at most."""


class MessageTooLargeError(CallEndedError):
    """A message exceeds the size limit.

    Args:
        way: The direction; the text is grpc's own, which clients parse.
        length: Its length in bytes.
        max_bytes: The limit in bytes.
    """

    def __init__(self, way: Literal["Received", "Sent"], length: int, max_bytes: int) -> None:
        message = f"{way} message larger than max ({length} vs. {max_bytes})"
        super().__init__(Failure(code=Code.RESOURCE_EXHAUSTED, message=message))


def decompressed(data: bytes, *, max_bytes: int) -> bytes:
    """Return what was compressed with gzip or deflate; if it is longer than ``max_bytes``, its beginning with one more.

    Raises:
        InvalidInputError: It was not, or is cut short.
    """
    decompressor = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        content = decompressor.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidInputError(f"the request is not compressed with gzip or deflate, as it says: {error}") from None
    if len(content) <= max_bytes and not decompressor.eof:
        raise InvalidInputError("the compressed request is cut short")
    return content


class MessageDecompressor:
    """Decompresses the messages of one port: large ones on another thread, one at a time. Belongs to the event loop.

    Args:
        max_bytes: The largest message.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turn = asyncio.Semaphore(1)

    async def decompress(self, message: bytes) -> bytes:
        """Return a decompressed message.

        Raises:
            InvalidInputError: It is not compressed with gzip or deflate.
            MessageTooLargeError: It is larger than the largest.
        """
        if len(message) <= _BRIEF_BYTES:
            content = decompressed(message, max_bytes=self._max_bytes)
        else:
            async with self._turn:
                content = await asyncio.to_thread(decompressed, message, max_bytes=self._max_bytes)
        if len(content) > self._max_bytes:
            raise MessageTooLargeError("Received", len(content), self._max_bytes)
        return content
