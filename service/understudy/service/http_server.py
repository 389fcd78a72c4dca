"""The server of the HTTP port, and the limits of its connections; `http_app` has what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from understudy.service.addresses import bare_host, host_and_port
from understudy.service.calls.served_call import MAX_HEADER_BYTES
from understudy.service.http_app import (
    BAD_REQUEST,
    HEADERS_TOO_LARGE,
    probes_only,
    refusal,
    with_certificate_names,
)
from understudy.service.service_errors import PortInUseError
from understudy.service.tls import ServerCertificates, certificate_names

_SHUTDOWN_SECONDS = 1
_MAX_UNPARSED_BYTES: Final = MAX_HEADER_BYTES + 4096
"""Of headers that arrive in pieces, with their separators; h11's default is 16 KiB."""

HEADER_SECONDS: Final = 10.0
"""The longest wait for the headers of a request: the first since its connection began, else since their first byte."""

LINGER_SECONDS: Final = 5.0
"""How long the rest of headers that are too large is read."""

IDLE_SECONDS: Final = 75
"""How long a connection may wait for its next request: longer than callers and proxies keep theirs (httpx 5 s, load
balancers 60 s). So they end it first, and send no request on a connection that the server is just closing."""

SPARED_SECONDS: Final = 5.0
"""A connection that has waited for less than this makes no room for a new one."""

STALLED_SECONDS: Final = 30.0
"""How long a reader of a response may take nothing of it."""


class HttpServer:
    """uvicorn on the running event loop and on a given socket.

    Args:
        app: The application.
        listener: A bound socket, which the server closes.
        certificates: The certificates for HTTPS; None to serve HTTP. If clients need certificates, callers without one
            reach `http_app.PROBES` only.
        max_connections: The most connections at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        certificates: ServerCertificates | None = None,
        *,
        max_connections: int,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=limited(_protocol(certificates), max_connections),
            log_config=None,
            access_log=False,
            proxy_headers=False,  # else callers on this machine choose the address that logs name
            lifespan="off",
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            h11_max_incomplete_event_size=_MAX_UNPARSED_BYTES,
        )
        if certificates is not None:
            config.load()
            config.ssl = _newest_context(certificates)
        self._server = _SignalFreeServer(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to serve; raise the error if that fails."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        answering = asyncio.create_task(self._server.answering.wait())
        await asyncio.wait([self._task, answering], return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        """Finish running requests, for a second at most, and close the socket."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()


def _newest_context(certificates: ServerCertificates) -> ssl.SSLContext:
    """Return a context that uses the newest certificates in each handshake."""

    def use_newest(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        connection.context = certificates.current.context

    context = certificates.current.context
    context.sni_callback = use_newest  # called in every handshake, also if the client sends no name
    return context


_PART_BYTES: Final = 1024
_PART_SECONDS: Final = 0.001
"""Of a body in chunks so many bytes are parsed at a time at first, and more as long as that takes less than this."""
_PAUSE_SECONDS: Final = 2 * _PART_SECONDS
"""How long the loop waits between two parts. Without a wait it takes Python's lock back before another thread wakes up,
for as long as there are parts."""

_MAX_OVERHEAD_BYTES: Final = 16_384
"""How much longer a body in chunks may be than twice its data: Go's HTTP server has the same limit. So a caller has the
time of 4,096 chunks, about 50 ms, on each connection."""


class HttpConnection(H11Protocol):
    """One connection. uvicorn itself ends only connections that are silent after a response.

    One whose caller does not read what it is sent is aborted, as it would hold its memory and its place.

    Attributes:
        max_connections: The most connections at once. A further one takes the place of the one that has been idle
            longest, if that is for `SPARED_SECONDS`; else it is closed at once.
        idle: The connections that wait for their next request, longest first, with the loop's time since when.
        parsing: The connections that have bytes to parse, of which one parses a part in each round of the loop.
    """

    max_connections: ClassVar[int]
    idle: ClassVar[OrderedDict[HttpConnection, float]]
    parsing: ClassVar[deque[HttpConnection]]
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _is_refused = False
    _unparsed = b""
    _part_bytes = _PART_BYTES
    _overhead_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections and not self._end_longest_idle():
            transport.abort()
            return
        self._await_headers()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        if self.timeout_keep_alive_task is None:
            return
        if self.conn.trailing_data[0]:  # of the next request's headers, sent with this one
            self._await_headers()
        else:
            self.idle[self] = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        """End the connection, once the loop has read what has arrived: uvloop may run a timer that is late before."""
        due = self.timeout_keep_alive_task
        self.loop.call_soon(self.loop.call_soon, self._end_if_unread, due)

    def end_idle(self) -> None:
        """End the connection, which waits for its next request."""
        self.idle.pop(self, None)
        super().timeout_keep_alive_handler()

    def _end_if_unread(self, due: asyncio.TimerHandle | None) -> None:
        if self.timeout_keep_alive_task is due:
            self.end_idle()

    def _end_longest_idle(self) -> bool:
        longest, since = next(iter(self.idle.items()), (None, 0.0))
        if longest is None or self.loop.time() - since < SPARED_SECONDS:
            return False
        longest.end_idle()
        return True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._is_refused:
            return
        if self._unparsed or (len(data) > self._part_bytes and not self._is_in_whole_body()):
            self._unparsed += data
            self._parse_part()
        else:
            self._parse(data)

    def _is_in_whole_body(self) -> bool:
        """Return whether the next bytes are of a body without chunks."""
        return self._is_answering() and all(name != b"transfer-encoding" for name, _ in self.headers)

    def _parse_part(self) -> None:
        """Parse some of what has arrived, and the rest in the next rounds of the loop: each small chunk takes 13 µs."""
        if self._is_refused or self.transport.is_closing():
            self._unparsed = b""
            return
        part, self._unparsed = self._unparsed[: self._part_bytes], self._unparsed[self._part_bytes :]
        began = time.monotonic()
        self._parse(part)
        is_brief = time.monotonic() - began < _PART_SECONDS
        self._part_bytes = 2 * self._part_bytes if is_brief else max(self._part_bytes // 2, _PART_BYTES)
        if self._unparsed and self._is_in_whole_body():
            rest, self._unparsed = self._unparsed, b""
            self._parse(rest)
        if self._unparsed:
            self.transport.pause_reading()
            self.parsing.append(self)
            if len(self.parsing) == 1:
                self.loop.call_later(_PAUSE_SECONDS, self._parse_next)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse_next(self) -> None:
        """Parse a part of the connection that has waited longest."""
        first = self.parsing.popleft()
        if self.parsing:
            self.loop.call_later(_PAUSE_SECONDS, self._parse_next)
        first._parse_part()  # noqa: SLF001 - another connection

    def _parse(self, data: bytes) -> None:
        self.idle.pop(self, None)
        if self._deadline is None and not self._is_answering():
            self._await_headers()
        request, held = self.cycle, self._held_bytes()
        super().data_received(data)
        if self._is_answering():
            self._forget_deadline()
            if not self._is_in_whole_body():
                self._count_overhead(len(data) - 2 * (self._held_bytes() - held) if self.cycle is request else None)

    def _held_bytes(self) -> int:
        """Return the size of what the application has not taken of the body."""
        cycle: Any = self.cycle  # None before the first request
        return 0 if cycle is None else len(cycle.body)

    def _count_overhead(self, more_bytes: int | None) -> None:
        """Refuse a body whose chunks are mostly their own lengths. None begins a new body."""
        self._overhead_bytes = 0 if more_bytes is None else max(self._overhead_bytes + more_bytes, 0)
        if self._overhead_bytes <= _MAX_OVERHEAD_BYTES:
            return
        self._is_refused = True
        cycle: Any = self.cycle
        if cycle.response_started:
            self.transport.abort()
        else:
            self.send_400_response("the body is in chunks of less than 5 bytes; send larger ones, or a Content-Length")

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, or too many for its headers. uvicorn calls it while it handles the error.

        What a caller still sends of its headers is read for a while: reset at once, it might lose the response.
        """
        error = sys.exception()
        is_too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HEADERS_TOO_LARGE
        if is_too_large:
            msg = f"the headers are too large; {MAX_HEADER_BYTES} bytes is the limit"
        response = refusal(HEADERS_TOO_LARGE if is_too_large else BAD_REQUEST, msg)
        for event in (
            h11.Response(status_code=response.status_code, headers=response.raw_headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if is_too_large:
            self._is_refused = True
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
            if self.transport.can_write_eof():  # not over TLS
                self.transport.write_eof()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        super().pause_writing()
        self._await_reader(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._forget_reader()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self.idle.pop(self, None)
        self._forget_deadline()
        self._forget_reader()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _await_reader(self, unread: int) -> None:
        """Look again later; abort the connection if nothing more has been read by then."""
        now: int = self.transport.get_write_buffer_size()
        if now >= unread:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(STALLED_SECONDS, self._await_reader, now)

    def _forget_reader(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def limited(protocol: type[HttpConnection], max_connections: int) -> type[HttpConnection]:
    """Return a protocol for a server with this many connections at most."""
    return type(
        protocol.__name__, (protocol,), {"max_connections": max_connections, "idle": OrderedDict(), "parsing": deque()}
    )


class _CertificateConnection(HttpConnection):
    """A connection whose requests carry the names in its caller's certificate, if it has one."""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if certificate is None:
            self.app = self.without_certificate(self.app)
        else:
            names = certificate_names(ssl.DER_cert_to_PEM_cert(certificate).encode("ascii"))
            self.app = with_certificate_names(self.app, names)

    @staticmethod
    def without_certificate(app: Any) -> Any:
        """Return what serves a caller without a certificate."""
        return app


class _RequiredCertificateConnection(_CertificateConnection):
    """A connection whose caller reaches `http_app.PROBES` only, unless it has a certificate."""

    @staticmethod
    def without_certificate(app: Any) -> Any:
        """See `_CertificateConnection`."""
        return probes_only(app)


def _protocol(certificates: ServerCertificates | None) -> type[HttpConnection]:
    if certificates is None or certificates.current.client_ca is None:
        return HttpConnection
    return _RequiredCertificateConnection if certificates.current.requires_client else _CertificateConnection


class _SignalFreeServer(uvicorn.Server):
    """Reports when it has started, and installs no signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port, or to any free port for 0.

    Raises:
        PortInUseError: The port is not available.
    """
    try:
        bare = bare_host(host)
        return socket.create_server((bare, port), family=socket.AF_INET6 if ":" in bare else socket.AF_INET)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen for HTTP on {host_and_port(host, port)}: {error.strerror or error}; choose another with "
            "--http-port or --host, or let --http-port 0 take a free one"
        ) from error
