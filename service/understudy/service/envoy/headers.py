"""gRPC's headers and trailers."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.envoy.framing import ENCODINGS
from understudy.service.handlers.failures import Failure
from understudy.service.request_id import HEADER
from understudy.service.status_details import DETAILS_KEY, status_details

Headers = list[tuple[bytes, bytes]]

CONTENT_TYPE: Final = b"application/grpc"
REQUEST_ID: Final = HEADER.encode()
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
    return [_OK] if request_id is None else [_OK, (REQUEST_ID, request_id.encode())]


def failure_trailers(failure: Failure, request_id: str) -> Headers:
    """Return the trailers of a failed call."""
    trailers = [
        (b"grpc-status", str(int(failure.code)).encode()),
        (b"grpc-message", percent_encoded(failure.message)),
        (REQUEST_ID, request_id.encode()),
    ]
    details = status_details(failure)
    if details is not None:
        trailers.append((DETAILS_KEY.encode(), base64.b64encode(details).rstrip(b"=")))
    return trailers


def percent_encoded(message: str) -> bytes:
    """Return a message encoded for the trailer ``grpc-message``: escape ``%`` and all but printable ASCII."""
    return _UNPRINTABLE.sub(lambda match: b"%%%02X" % ord(match[0]), message.encode())
