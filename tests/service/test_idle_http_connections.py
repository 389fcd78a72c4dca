"""HTTP connections that wait for their next request: how long they may, and that no request is lost when they end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme
import uvloop
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from testkit.certificates import SECONDS, Credentials
from understudy.service import http_app, http_server
from understudy.service.readiness import Readiness
from understudy.service.tls import ServerCertificates, TlsFiles

MAX_CONNECTIONS = 4
REQUEST = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
HOLDING = REQUEST.replace(b"/healthz", b"/hold")
SHORT_SECONDS = 0.1


class Clock:
    """The time of the running asyncio loop, which can be set forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._skipped = 0.0
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + self._skipped)

    def skip(self, seconds: float) -> None:
        self._skipped += seconds


class Caller:
    """A connection to the HTTP port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def asks(self, request: bytes = REQUEST) -> bytes:
        """Send a request; return the body of the answer, or nothing if the connection has ended."""
        self._writer.write(request)
        try:
            answer = await self._reader.readuntil(b"ok\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        return answer[-3:]

    async def sends(self, part: bytes) -> None:
        """Send a part of a request."""
        self._writer.write(part)
        await self._writer.drain()

    async def sees_the_end(self) -> bool:
        """Whether the server ends the connection."""
        with contextlib.suppress(ConnectionError):
            return await self._reader.read() == b""
        return True

    def close(self) -> None:
        self._writer.close()


class Port:
    """A running HTTP port, which ends the callers' connections when it ends."""

    def __init__(self, address: tuple[str, int], stack: contextlib.ExitStack) -> None:
        self.address = address
        self._stack = stack

    async def caller(self) -> Caller:
        caller = Caller(*await asyncio.open_connection(*self.address))
        self._stack.callback(caller.close)
        return caller


@contextlib.asynccontextmanager
async def running(*routes: Route, certificates: ServerCertificates | None = None) -> AsyncIterator[Port]:
    listener = http_server.bind("127.0.0.1", 0)
    app = http_app.build_app(readiness=Readiness(), routes=routes)
    server = http_server.HttpServer(app, listener, certificates, max_connections=MAX_CONNECTIONS)
    await server.start()
    try:
        with contextlib.ExitStack() as stack:
            yield Port(listener.getsockname(), stack)
    finally:
        await server.stop()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with running() as port:
        async with asyncio.timeout(SECONDS + 3 * http_server.IDLE_SECONDS):  # by a clock that is set forward
            yield port


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_a_connection_may_wait_for_a_minute_but_not_for_ever(port: Port, clock: Clock) -> None:
    patient = await port.caller()
    assert await patient.asks() == b"ok\n"
    of_httpx = httpx.Limits().keepalive_expiry
    assert of_httpx is not None
    for seconds in (of_httpx + 0.5, 60.5):
        clock.skip(seconds)
        assert await (await port.caller()).asks() == b"ok\n"  # timers that are due have run
        assert await patient.asks() == b"ok\n"
    clock.skip(http_server.IDLE_SECONDS + 1)
    assert await patient.sees_the_end()


async def test_at_a_full_port_a_new_caller_takes_the_place_of_the_one_that_has_been_idle_longest(
    port: Port, clock: Clock
) -> None:
    callers = [await port.caller() for _ in range(MAX_CONNECTIONS)]
    for caller in callers:
        assert await caller.asks() == b"ok\n"
        clock.skip(1)
    begun, longest_idle, *others = callers
    await begun.sends(REQUEST[:20])
    for caller in others:
        assert await caller.asks() == b"ok\n"
    clock.skip(http_server.SPARED_SECONDS)
    assert await (await port.caller()).asks() == b"ok\n"
    assert await longest_idle.sees_the_end()
    assert [await begun.asks(REQUEST[20:]), *[await caller.asks() for caller in others]] == [b"ok\n"] * 3


async def test_callers_that_have_just_been_answered_keep_their_places_at_a_full_port(port: Port, clock: Clock) -> None:
    callers = [await port.caller() for _ in range(MAX_CONNECTIONS)]
    for caller in callers:
        assert await caller.asks() == b"ok\n"
    clock.skip(http_server.SPARED_SECONDS / 2)
    assert await (await port.caller()).sees_the_end()
    assert [await caller.asks() for caller in callers] == [b"ok\n"] * MAX_CONNECTIONS


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_a_request_that_is_sent_while_the_loop_is_held_past_the_idle_time_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tls: bool
) -> None:
    monkeypatch.setattr("understudy.service.http_server.IDLE_SECONDS", SHORT_SECONDS)
    context, certificates = None, None
    if tls:
        credentials = Credentials(tmp_path, trustme.CA(), "127.0.0.1")
        certificates = ServerCertificates(
            TlsFiles(certificate=credentials.certificate, key=credentials.key, client_ca=None)
        )
        context = ssl.create_default_context(cafile=credentials.ca)
    uvloop.run(_answered_after_a_hold(certificates, context))  # which runs timers before it reads again


async def _answered_after_a_hold(certificates: ServerCertificates | None, context: ssl.SSLContext | None) -> None:
    loop, sent = asyncio.get_running_loop(), threading.Event()
    ready, trigger = socket.socketpair()

    def hold() -> None:
        """Hold the loop as gRPC's core does that copies a message, from when the connection is idle until too long."""
        loop.remove_reader(ready)
        assert sent.wait(SECONDS)
        time.sleep(2 * SHORT_SECONDS)

    async def hold_next(_request: Request) -> Response:
        loop.add_reader(ready, hold)
        trigger.send(b"!")
        return PlainTextResponse("ok\n")

    def ask_twice(address: tuple[str, int]) -> list[bytes]:
        with contextlib.ExitStack() as stack:
            caller = stack.enter_context(socket.create_connection(address, SECONDS))
            if context is not None:
                caller = stack.enter_context(context.wrap_socket(caller, server_hostname=address[0]))
            caller.sendall(HOLDING)
            first = _answer(caller)
            caller.sendall(REQUEST)
            sent.set()
            return [first, _answer(caller)]

    with ready, trigger:
        async with running(Route("/hold", hold_next), certificates=certificates) as port:
            assert await asyncio.to_thread(ask_twice, port.address) == [b"ok\n"] * 2


def _answer(caller: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while not received.endswith(b"ok\n") and (piece := caller.recv(65536)):
            received += piece
    return received[-3:]
