"""Reads the body of a request, and limits its size before and after decompression."""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import Request

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.handlers.request_errors import UnsupportedError

_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
_CODINGS = frozenset({"gzip", "deflate"})


IDLE_SECONDS = 10.0
"""The longest wait for the next chunk of a body."""
TOTAL_SECONDS = 120.0
"""The longest wait for a whole body."""


class BodyTooSlowError(Exception):
    """The body did not arrive in time."""


class BodyTooLargeError(Exception):
    """The body is larger than the server accepts."""


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the body as received; see `decoded`.

    Raises:
        BodyTooLargeError: It is too large.
        BodyTooSlowError: The body, or its next chunk, does not arrive in time.
    """
    body = bytearray()
    loop = asyncio.get_running_loop()
    ends = loop.time() + TOTAL_SECONDS
    try:
        async with asyncio.timeout(IDLE_SECONDS) as patience:
            async for chunk in request.stream():
                body += chunk
                _check_size(len(body), max_bytes)
                patience.reschedule(min(loop.time() + IDLE_SECONDS, ends))
    except TimeoutError:
        raise BodyTooSlowError(
            f"the body is unfinished after {len(body)} bytes; each piece may take {IDLE_SECONDS:g} s and the whole "
            f"{TOTAL_SECONDS:g} s"
        ) from None
    return bytes(body)


def coding_of(request: Request) -> str:
    """Return the content coding of the body, ``identity`` if it is not compressed."""
    return request.headers.get("content-encoding", "identity").lower()


def decoded(body: bytes, coding: str, *, max_bytes: int) -> bytes:
    """Return the decompressed body. May take a while.

    Raises:
        BodyTooLargeError: It is too large after decompression.
        UnsupportedError: Its coding is neither gzip nor deflate.
        InvalidInputError: It cannot be decompressed.
    """
    if coding == "identity":
        return body
    if coding not in _CODINGS:
        raise UnsupportedError(f"the content encoding {coding!r} is not supported; send gzip, deflate or none")
    return _decompressed(body, coding, max_bytes)


def _decompressed(body: bytes, coding: str, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        content = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidInputError(f"the body is not {coding} data: {error}") from None
    _check_size(len(content), max_bytes)
    if not decompressor.eof:
        raise InvalidInputError(f"the body's {coding} data is cut short")
    return content


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise BodyTooLargeError(f"the body has more than {max_bytes} bytes; send less, or raise --max-rest-mib")
