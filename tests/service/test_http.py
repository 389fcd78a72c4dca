from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from understudy.service import http_app, http_server
from understudy.service.calls.caller import is_direct
from understudy.service.listening_settings import ListeningSettings
from understudy.service.readiness import Readiness
from understudy.service.service_errors import PortInUseError

MAX_CONNECTIONS = 4
SECONDS = 20.0


@pytest.fixture
async def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def client(readiness: Readiness) -> AsyncIterator[httpx.AsyncClient]:
    listener = http_server.bind("127.0.0.1", 0)
    server = http_server.HttpServer(
        http_app.build_app(readiness=readiness),
        listener,
        max_connections=MAX_CONNECTIONS,
    )
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        yield client
    await server.stop()


async def test_the_process_is_healthy_from_the_start(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).status_code == 200


async def test_it_is_ready_from_the_first_checkpoint_until_draining(
    client: httpx.AsyncClient, readiness: Readiness
) -> None:
    waiting = await client.get("/readyz")
    readiness.become_ready()
    ready = await client.get("/readyz")
    readiness.start_draining()
    draining = await client.get("/readyz")
    assert [answer.status_code for answer in (waiting, ready, draining)] == [503, 200, 503]
    assert waiting.json() == {"ready": False, "reason": "no checkpoint has been loaded yet"}
    assert ready.json() == {"ready": True, "reason": "ready"}
    assert "draining" in draining.json()["reason"]


async def test_a_connection_without_the_headers_of_a_request_ends(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.service.http_server.HEADER_SECONDS", 0.5)
    whole = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    for first in (b"", whole[:20], whole + whole[:20]):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(first)
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        assert answer.count(b"200 OK") == first.count(whole)
        writer.close()


async def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_taken_for_a_request(
    client: httpx.AsyncClient,
) -> None:
    lengths = b"content-length: 3\r\ntransfer-encoding: chunked\r\n"
    following = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"POST /healthz HTTP/1.1\r\nhost: x\r\n" + lengths + b"\r\n0\r\n\r\n" + following)
    answer = await asyncio.wait_for(reader.read(), SECONDS)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"both Content-Length and Transfer-Encoding" in answer
    writer.close()


@pytest.mark.parametrize("size", [62_000, 200_000, 1_000_000])
async def test_headers_that_are_too_large_are_refused_with_the_limit(client: httpx.AsyncClient, size: int) -> None:
    answer = await client.get("/healthz", headers={"x-first": "v" * size, "x-second": "v"})
    assert (answer.status_code, "61440" in answer.json()["error"]) == (431, True)
    assert (await client.get("/healthz", headers={"x-first": "v" * 61_000})).status_code == 200


@pytest.mark.parametrize("path", ["/", "/metrics", "/v2/models/digits/infer"])
async def test_a_page_of_the_web_cannot_read_a_port_of_this_machine_under_its_own_name(path: str) -> None:
    async def content(_request: Request) -> Response:
        return PlainTextResponse("content")

    app = http_app.build_app(
        readiness=Readiness(),
        routes=[Route(path, content, methods=["GET", "POST"])],
        allowed_hosts=["Models.example"],
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8501") as client:
        for name in ("rebound.example", "rebound.example:8501", "127.0.0.1.rebound.example", "[::1"):
            answer = await client.request("POST" if "v2" in path else "GET", path, headers={"host": name})
            assert answer.status_code == 403, name
            assert "--allowed-hosts" in answer.json()["error"]
        for name in ("127.0.0.1:8501", "localhost", "[::1]:8501", "models.EXAMPLE:80", ""):
            assert (await client.get(path, headers={"host": name})).text == "content", name
        assert (await client.get("/healthz", headers={"host": "probe.example"})).status_code == 200


@pytest.mark.parametrize(
    ("host", "direct"),
    [
        ("127.0.0.1:8501", True),
        ("[::1]:8501", True),
        ("10.1.2.3", True),
        ("localhost:8501", True),
        ("evil.example:8501", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[::1", False),
        ("[::1].evil.example", False),
        ("[::1]evil.example:8501", False),
        ("evil.example@127.0.0.1", False),
        ("127.0.0.1:80@evil.example", False),
        ("localhost/evil.example", False),
        (None, False),
    ],
)
def test_only_addresses_and_localhost_cannot_be_the_name_of_another_site(host: str | None, direct: bool) -> None:  # noqa: FBT001
    assert is_direct(host) is direct


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ()),
        ({"allowed_hosts": ("models.example",)}, ("models.example",)),
        ({"callers": Path("callers.toml")}, None),
        ({"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}, None),
        ({"host": "0.0.0.0", "insecure": True}, None),  # noqa: S104 - nothing is bound
    ],
)
def test_names_are_checked_where_nothing_else_keeps_pages_of_the_web_out(
    settings: dict[str, Any], names: tuple[str, ...] | None
) -> None:
    assert ListeningSettings(**settings).http_names == names


async def test_what_is_no_request_is_refused(client: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"no request\r\n\r\n")
    async with asyncio.timeout(SECONDS):
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 400 ")
    writer.close()


@pytest.mark.parametrize(("size", "status"), [(20_000, 200), (61_000, 200), (70_000, 431)])
async def test_headers_have_the_same_limit_if_they_arrive_in_pieces(
    client: httpx.AsyncClient, size: int, status: int
) -> None:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    for piece in (b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: ", *[b"v" * 1000] * (size // 1000), b"\r\n\r\n"):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)  # the server, on this loop too, reads each
    async with asyncio.timeout(SECONDS):
        assert (await reader.readline()).startswith(f"HTTP/1.1 {status} ".encode())
    writer.close()


async def test_many_small_chunks_of_a_body_hold_the_loop_only_briefly() -> None:
    body = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body.append(await Request(scope, receive).body())
        await PlainTextResponse("content")(scope, receive, send)

    listener = http_server.bind("127.0.0.1", 0)
    server = http_server.HttpServer(app, listener, max_connections=MAX_CONNECTIONS)
    await server.start()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"5\r\nxxxxx\r\n" * 40_000 + b"0\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    reading = asyncio.create_task(reader.read())
    longest = 0.0
    async with asyncio.timeout(SECONDS):
        while not reading.done():
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)
    assert reading.result().count(b"HTTP/1.1 200 OK") == 2
    assert body == [b"x" * 200_000, b""]
    assert longest < 0.1
    writer.close()
    await server.stop()


def test_other_threads_have_their_turns_while_bodies_in_small_chunks_are_parsed() -> None:
    ended, turns = threading.Event(), itertools.count()

    def take_turns() -> None:
        while not ended.wait(0.001):
            next(turns)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await PlainTextResponse("content")(scope, receive, send)

    async def send_bodies() -> int:
        listener = http_server.bind("127.0.0.1", 0)
        server = http_server.HttpServer(app, listener, max_connections=MAX_CONNECTIONS)
        await server.start()
        connections = [await asyncio.open_connection(*listener.getsockname()) for _ in range(2)]
        before = next(turns)
        for _, writer in connections:
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
            writer.write(b"5\r\nxxxxx\r\n" * 40_000 + b"0\r\n\r\n")
        for reader, writer in connections:
            assert (await asyncio.wait_for(reader.read(), SECONDS)).startswith(b"HTTP/1.1 200 ")
            writer.close()
        taken = next(turns) - before
        await server.stop()
        return taken

    other = threading.Thread(target=take_turns)
    other.start()
    try:
        taken = uvloop.run(send_bodies())
    finally:
        ended.set()
        other.join()
    assert taken >= 60  # there are hundreds of parts; the other thread waited for a tenth of a second at a time


async def test_a_body_that_is_mostly_the_lengths_of_its_chunks_is_refused() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await PlainTextResponse("content")(scope, receive, send)

    listener = http_server.bind("127.0.0.1", 0)
    server = http_server.HttpServer(app, listener, max_connections=MAX_CONNECTIONS)
    await server.start()
    start = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for chunks, status in ((4_000, b"200"), (5_000, b"400")):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(start + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")
        async with asyncio.timeout(SECONDS):
            line = await reader.readline()
        assert line.startswith(b"HTTP/1.1 " + status)
        writer.close()
    await server.stop()


async def test_a_connection_beyond_the_limit_is_closed_at_once(client: httpx.AsyncClient) -> None:
    held = [await asyncio.open_connection(client.base_url.host, client.base_url.port) for _ in range(MAX_CONNECTIONS)]
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), SECONDS) == b""
    for _, each in [*held, (reader, writer)]:
        each.close()
    assert (await client.get("/healthz")).status_code == 200


async def test_a_connection_whose_caller_does_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.service.http_server.STALLED_SECONDS", 0.2)
    ended = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        try:
            for _ in range(64):
                yield bytes(2**20)
        finally:
            ended.set()

    async def large(_request: Request) -> StreamingResponse:
        return StreamingResponse(chunks())

    listener = http_server.bind("127.0.0.1", 0)
    app = http_app.build_app(readiness=Readiness(), routes=[Route("/large", large)])
    server = http_server.HttpServer(app, listener, max_connections=MAX_CONNECTIONS)
    await server.start()
    with socket.create_connection(listener.getsockname()) as caller:
        caller.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(ended.wait(), SECONDS)
    await server.stop()


async def test_another_path_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/admin")).status_code == 404


def test_a_port_in_use_names_the_address_and_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"127\.0\.0\.1:{port}.*--http-port"):
            http_server.bind("127.0.0.1", port)
