"""Stands in for Envoy and pyvoy in this process, on grpc's own server: passes calls to an ASGI application.

The application is the real one. Tests that need the real Envoy start ``understudy serve --frontend envoy``.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc

Application = Callable[[Any, Any, Any], Awaitable[None]]

_GenericHandler: Any = grpc.GenericRpcHandler  # generic in the stubs only
_PREFIX = struct.Struct(">BI")
_NOT_TRAILING = ("content-type", "grpc-accept-encoding")
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class AsgiHandler(_GenericHandler):  # type: ignore[misc]  # see above
    """Answers every method.

    Args:
        application: The application.
        ended: Called with each method's path when the application has finished the call.
    """

    def __init__(self, application: Application, ended: asyncio.Queue[str]) -> None:
        self._application = application
        self._ended = ended

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method

        async def answer(requests: Any, context: Any) -> None:
            await _Exchange(requests, context).run(self._run, path)

        make: Any = grpc.stream_stream_rpc_method_handler
        return make(answer)

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._application(scope, receive, send)
        finally:
            self._ended.put_nowait(scope["path"])


class _Exchange:
    """One call."""

    def __init__(self, requests: Any, context: Any) -> None:
        self._requests = requests
        self._context = context
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._finished = False
        self._gone = asyncio.Event()
        self._received = b""

    async def run(self, application: Application, path: str) -> None:
        pump = asyncio.create_task(self._pump())
        running = asyncio.ensure_future(application(self._scope(path), self._receive, self._send))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._gone.set()
            await running
            raise
        finally:
            pump.cancel()

    def _scope(self, path: str) -> dict[str, Any]:
        headers = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        headers += [(key.encode(), value.encode()) for key, value in self._context.invocation_metadata()]
        remaining = self._context.time_remaining()
        if remaining is not None:
            headers.append((b"grpc-timeout", b"%dm" % (remaining * 1000)))
        host, port = self._context.peer().removeprefix("ipv4:").rsplit(":", 1)
        client = (host, int(port))
        return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": client}

    async def _pump(self) -> None:
        async for message in self._requests:
            self._chunks.put_nowait(_PREFIX.pack(0, len(message)) + message)
        self._chunks.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if self._finished and not self._gone.is_set():
            return {"type": "http.request", "body": b"", "more_body": False}
        chunk = asyncio.ensure_future(self._chunks.get())
        gone = asyncio.ensure_future(self._gone.wait())
        await asyncio.wait([chunk, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not chunk.done():
            chunk.cancel()
            return {"type": "http.disconnect"}
        body = chunk.result()
        self._finished = body is None
        return {"type": "http.request", "body": body or b"", "more_body": body is not None}

    async def _send(self, event: dict[str, Any]) -> None:
        if self._gone.is_set():
            raise OSError
        if event["type"] == "http.response.body":
            self._received += event["body"]
            while len(self._received) >= _PREFIX.size:
                _, length = _PREFIX.unpack_from(self._received)
                end = _PREFIX.size + length
                if len(self._received) < end:
                    break
                message, self._received = self._received[_PREFIX.size : end], self._received[end:]
                await self._context.write(message)
        elif event["type"] == "http.response.trailers" or not event.get("trailers", True):
            headers = {key.decode(): value.decode() for key, value in event["headers"]}
            self._end({key: value for key, value in headers.items() if key not in _NOT_TRAILING})

    def _end(self, trailers: dict[str, str]) -> None:
        self._context.set_code(_CODES[int(trailers.pop("grpc-status"))])
        self._context.set_details(unquote(trailers.pop("grpc-message", "")))
        self._context.set_trailing_metadata(
            tuple((key, _decoded(value) if key.endswith("-bin") else value) for key, value in trailers.items())
        )


def _decoded(value: str) -> bytes:
    return base64.b64decode(value + "=" * (-len(value) % 4))
