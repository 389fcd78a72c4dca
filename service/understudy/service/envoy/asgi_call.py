"""One call over ASGI: the body of its request, and its response."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from understudy.service.addresses import host_and_port
from understudy.service.calls.call_limits import DisconnectMonitor, WatchedCall
from understudy.service.calls.compression import MessageTooLargeError
from understudy.service.calls.served_call import check_headers
from understudy.service.calls.status import CALLER_GONE, CallEndedError, Failure, caller_gone
from understudy.service.envoy.grpc_wire import (
    RESPONSE_HEADERS,
    Headers,
    failure_trailers,
    ok_trailers,
    prefix,
    seconds_of,
)
from understudy.service.tls import certificate_names

_CERTIFICATE_HEADER: Final = b"x-forwarded-client-cert"
"""The header in which Envoy describes the certificate of a caller."""
_CERTIFICATE: Final = re.compile(rb'(?:^|;)Cert="([^"]*)"')

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@functools.lru_cache(maxsize=1024)
def _names_in(header: bytes) -> tuple[str, ...]:
    """Return the names in the certificate of a header that Envoy has set."""
    match = _CERTIFICATE.search(header)
    return () if match is None else certificate_names(unquote_to_bytes(match[1]))


class CallerGoneError(CallEndedError):
    """The caller has disconnected."""

    def __init__(self) -> None:
        super().__init__(CALLER_GONE)


class AsgiCall(WatchedCall):
    """A call over ASGI: the chunks of its body in order, which one task at a time reads, and its reply.

    A pending receive is never cancelled, since pyvoy would lose its message; the next reader gets it.

    Args:
        scope: The ASGI scope.
        headers: Its headers.
        receive: The ASGI receive function.
        send: The ASGI send function.
        monitor: Watches the call.
        max_message_bytes: The largest message to send.

    Attributes:
        body_ended: Whether the body has been read to its end.
        encoding: The header ``grpc-encoding``, if present.
        reply: Sends the response.
    """

    __slots__ = ("_awaited", "_headers", "_receive", "_scope", "body_ended", "encoding", "reply")

    def __init__(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        send: Send,
        *,
        monitor: DisconnectMonitor,
        max_message_bytes: int,
    ) -> None:
        self._scope = scope
        self._headers = headers
        super().__init__(monitor)
        self._receive = receive
        self._awaited: asyncio.Future[Mapping[str, Any]] | None = None
        self.body_ended = False
        self.encoding = headers.get(b"grpc-encoding")
        self.reply = Reply(send, self.request_id, max_message_bytes, is_callers=self.has_callers_id)

    @property
    def peer(self) -> str:
        """See `Call`."""
        host, port = self._scope.get("client") or ("", 0)
        return host_and_port(host, port)

    def certificate_names(self) -> Sequence[str]:
        """See `Call`. Envoy itself sets the header, and removes one that a caller sends."""
        value = self._headers.get(_CERTIFICATE_HEADER)
        return () if value is None else _names_in(value)

    def header(self, name: str) -> str | None:
        """See `Call`."""
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def count_of(self, name: str) -> int:
        """See `Call`."""
        sent = name.encode()
        return sum(key == sent for key, _ in self._scope["headers"])

    def open(self) -> None:
        """See `Call`; raise CallEndedError if the headers are too large."""
        check_headers(self._scope["headers"])
        timeout = self._headers.get(b"grpc-timeout")
        if timeout is not None:
            self.deadline = self.started + seconds_of(timeout)
        self.monitor.enter(self)

    async def fail(self, failure: Failure) -> None:
        """See `Call`."""
        with suppress(CallerGoneError):
            await self.reply.end(failure)

    async def first_chunk(self) -> bytes:
        """Return the first chunk, for a task that is never cancelled; raise CallerGoneError if the sender has gone."""
        return self._chunk_of(await self._next_message())

    async def next_chunk(self) -> bytes | None:
        """Return the next chunk, or None at the end; raise CallerGoneError if the sender has gone."""
        return None if self.body_ended else self._chunk_of(await asyncio.shield(self._next_message()))

    async def chunk_or_cancelled(self) -> bytes | None:
        """Return the next chunk, or None at the end; if the caller has gone, wait to be cancelled."""
        try:
            return await self.next_chunk()
        except CallerGoneError:
            self.end(caller_gone(self.deadline))
            await asyncio.Event().wait()
            raise

    def poll(self) -> None:
        """See `WatchedCall`. Does nothing while a receive is pending, which probes as well."""
        if self._awaited is None:
            self._next_message().add_done_callback(self._on_message)

    def _next_message(self) -> asyncio.Future[Mapping[str, Any]]:
        if self._awaited is None:
            self._awaited = asyncio.ensure_future(self._receive())
        return self._awaited

    def _chunk_of(self, message: Mapping[str, Any]) -> bytes:
        self._awaited = None
        if message["type"] == "http.disconnect":
            raise CallerGoneError
        self.body_ended = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk

    def _on_message(self, received: asyncio.Future[Mapping[str, Any]]) -> None:
        if received.cancelled():
            return
        if received.result()["type"] == "http.disconnect":
            self.end(caller_gone(self.deadline))
        elif self.body_ended and self._awaited is received:
            self._awaited = None  # after the end, ASGI returns empty messages


_PIECE_BYTES: Final = 1 << 20
"""A larger message is sent in pieces, so that neither side holds it twice."""

_UNSUPPORTED_MEDIA_TYPE: Final = 415
_NOT_GRPC: Final = b"this port speaks gRPC; the HTTP port answers everything else\n"


def _start(headers: Headers, *, has_trailers: bool) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": headers, "trailers": has_trailers}


_START: Final = _start(RESPONSE_HEADERS, has_trailers=True)
_END: Final[dict[str, Any]] = {"type": "http.response.body", "body": b"", "more_body": False}


def _trailers(headers: Headers) -> dict[str, Any]:
    return {"type": "http.response.trailers", "headers": headers, "more_trailers": False}


_OK: Final = _trailers(ok_trailers())


class Reply:
    """Sends one response. Used by one task at a time.

    All methods raise CallerGoneError if the caller has disconnected.

    Args:
        send: The ASGI send function.
        request_id: The call's id, which goes into the trailers of a failure.
        max_bytes: The largest message to send.
        is_callers: Whether the caller sent the id; then the trailers always carry it.
    """

    __slots__ = ("_is_callers", "_max_bytes", "_request_id", "_send", "_started")

    def __init__(self, send: Send, request_id: str, max_bytes: int, *, is_callers: bool) -> None:
        self._send = send
        self._request_id = request_id
        self._max_bytes = max_bytes
        self._is_callers = is_callers
        self._started = False

    async def only(self, data: bytes) -> None:
        """Send the single message of a call and the trailers of success.

        Raises:
            MessageTooLargeError: The message exceeds the size limit. Nothing was sent.
        """
        if len(data) > _PIECE_BYTES:
            await self.message(data)
            await self.end()
            return
        send = self._send
        self._check(data)
        self._started = True
        try:
            await send(_START)
            await send({"type": "http.response.body", "body": prefix(len(data)) + data, "more_body": False})
            await send(self._ok())
        except OSError as error:
            raise CallerGoneError from error

    async def message(self, data: bytes) -> None:
        """Send one message of several, and wait until there is room for more.

        Raises:
            MessageTooLargeError: The message exceeds the size limit. It was not sent.
        """
        self._check(data)
        await self._start()
        if len(data) <= _PIECE_BYTES:
            await self._body(prefix(len(data)) + data)
            return
        await self._body(prefix(len(data)))
        for begin in range(0, len(data), _PIECE_BYTES):
            await self._body(data[begin : begin + _PIECE_BYTES])

    async def end(self, failure: Failure | None = None) -> None:
        """Send the trailers with the status of the call.

        A failure before any message is sent as headers alone: gRPC clients retry only such a response.
        """
        status = None if failure is None else failure_trailers(failure, self._request_id)
        if status is not None and not self._started:
            self._started = True
            await self._out(_start([*RESPONSE_HEADERS, *status], has_trailers=False))
            await self._out(_END)
            return
        await self._start()
        await self._out(_END)
        await self._out(self._ok() if status is None else _trailers(status))

    def _ok(self) -> dict[str, Any]:
        # A new id for each call would fill HPACK's table, which costs both sides more than all other trailers.
        return _trailers(ok_trailers(self._request_id)) if self._is_callers else _OK

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._out(_START)

    async def _out(self, event: dict[str, Any]) -> None:
        try:
            await self._send(event)
        except OSError as error:
            raise CallerGoneError from error

    async def _body(self, data: bytes) -> None:
        try:
            # Shielded, since pyvoy does not expect its futures to be cancelled.
            await asyncio.shield(self._send({"type": "http.response.body", "body": data, "more_body": True}))
        except OSError as error:
            raise CallerGoneError from error

    def _check(self, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise MessageTooLargeError("Sent", len(data), self._max_bytes)


async def refuse_media_type(send: Send) -> None:
    """Respond to a request that does not use gRPC."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(_NOT_GRPC))]
    await send({"type": "http.response.start", "status": _UNSUPPORTED_MEDIA_TYPE, "headers": headers})
    await send({"type": "http.response.body", "body": _NOT_GRPC, "more_body": False})
