"""One call over HTTP: its deadline, the body of its request with its limits, and the response to a failure."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.addresses import host_and_port
from understudy.service.calls.body_budget import BodyBudget, BodyReservation
from understudy.service.calls.call_limits import DisconnectMonitor, WatchedCall
from understudy.service.calls.compression import decompressed
from understudy.service.calls.parsing import joined
from understudy.service.calls.served_call import ServedMethod
from understudy.service.calls.status import (
    CALLER_GONE,
    CallEndedError,
    Code,
    Failure,
    UnsupportedError,
    caller_gone,
)

CERTIFICATE_NAMES: Final = "understudy.certificate_names"
"""The key of an ASGI scope with the names in the caller's verified certificate."""
TIMEOUT_HEADER: Final = "x-request-timeout"
"""How long the caller waits, in seconds."""
ENVOY_TIMEOUT_HEADER: Final = "x-envoy-expected-rq-timeout-ms"
"""How long Envoy, as a proxy, waits for the response, in milliseconds."""
DEFAULT_TIMEOUT_SECONDS: Final = 300.0
"""The bound of a call without a header; Knative's and so KServe's default."""

IDLE_SECONDS = 10.0
"""The longest wait for the next chunk of a body."""
TOTAL_SECONDS = 120.0
"""The longest wait for a whole body."""
MAX_BYTES_AT_ONCE: Final = 32_768
"""Bodies up to this size are parsed and rendered on the event loop; larger ones on another thread."""

_PIECE_BYTES: Final = 65_536
"""Shorter pieces of a body grow, so that a caller that sends single bytes has no object made of each."""

HTTP_OK: Final = 200
TOO_SLOW: Final = 408
TOO_LARGE: Final = 413
CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status for a client that disconnected; gRPC's own table has it for CANCELLED."""

HTTP_STATUS: Final[Mapping[Code, int]] = {
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

_CODINGS: Final = frozenset({"gzip", "deflate"})
_SECONDS: Final = re.compile(r"\d{1,9}(\.\d{1,9})?")
_MILLISECONDS: Final = re.compile(r"\d{1,12}")

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class HttpFailure(Failure):
    """A failure with an HTTP status of its own.

    Attributes:
        status: The HTTP status.
        closes: Whether the connection ends with the response.
    """

    status: int
    closes: bool = False


class RestCall(WatchedCall):
    """A call over HTTP.

    Args:
        request: The request.
        served: The method, which counts the request message.
        monitor: Watches the call.
        max_body_bytes: The largest body to accept.
        bodies: Bounds the memory of unfinished bodies.
        executor: Decompresses bodies, and parses and renders large ones, with one thread.
        route: The path of the method, with the names of its variables, for its trace.

    Attributes:
        default_timeout_seconds: The bound of a call without a header.
        request: The request.
        status: The HTTP status of a call that succeeded.
    """

    default_timeout_seconds: ClassVar[float] = DEFAULT_TIMEOUT_SECONDS

    __slots__ = (
        "_bodies",
        "_body_ended",
        "_executor",
        "_failure",
        "_max_body_bytes",
        "_probe",
        "_route",
        "_served",
        "request",
        "status",
    )

    def __init__(
        self,
        request: Request,
        served: ServedMethod,
        monitor: DisconnectMonitor,
        *,
        max_body_bytes: int,
        bodies: BodyBudget,
        executor: Executor,
        route: str = "",
    ) -> None:
        self.request = request
        self._served = served
        self._route = route
        self._failure: Failure = CALLER_GONE
        self.status = HTTP_OK
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies
        self._executor = executor
        self._body_ended = False
        self._probe: asyncio.Task[Any] | None = None
        super().__init__(monitor)

    @property
    def peer(self) -> str:
        """See `Call`."""
        client = self.request.client
        return "" if client is None else host_and_port(client.host, client.port)

    def certificate_names(self) -> Sequence[str]:
        """See `Call`."""
        names: Sequence[str] = self.request.scope.get(CERTIFICATE_NAMES, ())
        return names

    def header(self, name: str) -> str | None:
        """See `Call`."""
        return self.request.headers.get(name)

    def count_of(self, name: str) -> int:
        """See `Call`."""
        return len(self.request.headers.getlist(name))

    def open(self) -> None:
        """See `Call`."""
        given = _timeout_seconds(self.header(TIMEOUT_HEADER), self.header(ENVOY_TIMEOUT_HEADER))
        self.deadline = self.started + (self.default_timeout_seconds if given is None else given)
        self.monitor.enter(self)
        self.allow_cancelling()

    def close(self) -> None:
        """See `Call`."""
        if self._probe is not None:
            self._probe.cancel()
        super().close()

    def poll(self) -> None:
        """See `WatchedCall`. Does nothing before the end of the body, whose reader learns of a disconnect itself."""
        if self._body_ended and self._probe is None:
            self._probe = asyncio.ensure_future(self.request.receive())
            self._probe.add_done_callback(self._on_message)

    async def fail(self, failure: Failure) -> None:
        """Keep the failure for `failure_response`."""
        self._failure = failure

    def span_name(self) -> str:
        """See `Call`."""
        return f"{self.request.method} {self._route}"

    def span_attributes(self) -> dict[str, str | int]:
        """See `Call`. The method is the one of gRPC that the path is a form of."""
        request = self.request
        return {
            "http.request.method": request.method,
            "http.route": self._route,
            "url.path": request.url.path,
            "url.scheme": request.url.scheme,
            "rpc.method": self.method[1:],
        }

    def span_outcome(self, failure: Failure | None) -> dict[str, str | int]:
        """See `Call`."""
        status = self.status if failure is None else http_status(failure)
        return {**super().span_outcome(failure), "http.response.status_code": status}

    def failure_response(self) -> JSONResponse:
        """Return the response of a failed call."""
        return response_to_failure(self._failure)

    def has_no_body(self) -> None:
        """Count a request without a body."""
        self._served.received(self, 0)

    async def body(self) -> bytes:
        """Return the decompressed body.

        Raises:
            CallEndedError: It is too large, it or its next chunk does not arrive in time, or the caller disconnects.
            UnsupportedError: Its coding is neither gzip nor deflate.
            InvalidInputError: It cannot be decompressed.
        """
        pieces = await self._received_pieces()
        body = await self.brief_or_on_a_thread(partial(joined, pieces), size=sum(map(len, pieces)))
        self._body_ended = True
        coding = self.request.headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            if coding not in _CODINGS:
                raise UnsupportedError(f"the content encoding {coding!r} is not supported; send gzip, deflate or none")
            decompress = partial(decompressed, body, max_bytes=self._max_body_bytes)
            body = await asyncio.get_running_loop().run_in_executor(self._executor, decompress)
            _check_size(len(body), self._max_body_bytes)
        self._served.received(self, len(body))
        return body

    async def brief_or_on_a_thread(self, work: Callable[[], _T], *, size: int) -> _T:
        """Run work on this many bytes: here, or on another thread if there are many."""
        if size <= MAX_BYTES_AT_ONCE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _received_pieces(self) -> list[bytearray]:
        """Return the body in pieces, as one buffer that grows would be copied again and again on the event loop."""
        pieces = [bytearray()]
        size = 0
        loop = asyncio.get_running_loop()
        ends = loop.time() + TOTAL_SECONDS
        try:
            with BodyReservation(self._bodies, self.usage) as reservation:
                async with asyncio.timeout(IDLE_SECONDS) as patience:
                    async for chunk in self.request.stream():
                        size += len(chunk)
                        reservation.hold(size)
                        _check_size(size, self._max_body_bytes)
                        if len(pieces[-1]) < _PIECE_BYTES:
                            pieces[-1] += chunk
                        else:
                            pieces.append(bytearray(chunk))
                        if len(chunk) >= _PIECE_BYTES:
                            async with self._bodies.turn:
                                await asyncio.sleep(0)
                        patience.reschedule(min(loop.time() + IDLE_SECONDS, ends))
        except ClientDisconnect:
            raise CallEndedError(CALLER_GONE) from None
        except TimeoutError:
            message = (
                f"the body is unfinished after {size} bytes; each piece may take {IDLE_SECONDS:g} s and the whole "
                f"{TOTAL_SECONDS:g} s"
            )
            raise CallEndedError(
                HttpFailure(code=Code.DEADLINE_EXCEEDED, message=message, status=TOO_SLOW, closes=True)
            ) from None
        return pieces

    def _on_message(self, probe: asyncio.Future[Mapping[str, Any]]) -> None:
        self._probe = None
        if not probe.cancelled() and probe.result()["type"] == "http.disconnect":
            self.end(caller_gone(self.deadline))


def response_to_failure(failure: Failure) -> JSONResponse:
    """Return a failure in the protocol's form: its message under ``error``."""
    headers = {}
    if failure.retry_after_seconds is not None:
        headers["retry-after"] = str(math.ceil(failure.retry_after_seconds))
    if failure.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = 'Bearer realm="understudy"'
    if isinstance(failure, HttpFailure) and failure.closes:
        headers["connection"] = "close"
    return JSONResponse({"error": failure.message}, status_code=http_status(failure), headers=headers)


def http_status(failure: Failure) -> int:
    """Return the HTTP status of a failure."""
    return failure.status if isinstance(failure, HttpFailure) else HTTP_STATUS[failure.code]


def _timeout_seconds(own: str | None, envoys: str | None) -> float | None:
    """Return the shorter timeout of the caller's header and of Envoy's; None if there is neither."""
    timeouts = []
    if own is not None:
        if not _SECONDS.fullmatch(own):
            raise InvalidInputError(f"X-Request-Timeout is {own!r}; seconds such as 2 or 0.5 were expected")
        timeouts.append(float(own))
    if envoys is not None and _MILLISECONDS.fullmatch(envoys):
        timeouts.append(int(envoys) / 1000)
    return min(timeouts, default=None)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        message = f"the body has more than {max_bytes} bytes; send less, or raise --max-rest-mib"
        raise CallEndedError(HttpFailure(code=Code.RESOURCE_EXHAUSTED, message=message, status=TOO_LARGE))
