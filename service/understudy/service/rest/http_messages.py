"""HTTP around the JSON: the body of a request, limited before and after decompression, and the responses."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.status import Code, Failure, UnsupportedError

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


CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; gRPC's own table has it for CANCELLED."""

HTTP_STATUS: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ABORTED: 409,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: CLIENT_CLOSED_REQUEST,
    Code.INTERNAL: 500,
    Code.UNKNOWN: 500,
    Code.DATA_LOSS: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""The table of ``google/rpc/code.proto``."""


def failure_response(failure: Failure) -> JSONResponse:
    """Return a failure in the protocol's form: its message under ``error``."""
    headers = {}
    if failure.retry_after_seconds is not None:
        headers["retry-after"] = str(math.ceil(failure.retry_after_seconds))
    return JSONResponse({"error": failure.message}, status_code=HTTP_STATUS[failure.code], headers=headers)


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
