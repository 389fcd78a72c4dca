"""Answers every gRPC call with an empty message, as an ASGI application under pyvoy: the cost of Envoy alone.

pyvoy benchmarks.speed.programs.echo_asgi:app --port PORT
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]

_EMPTY_FRAME = bytes(5)
_HEADERS = [(b"content-type", b"application/grpc")]
_TRAILERS = [(b"grpc-status", b"0")]


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Read one request and answer it."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS, "trailers": True})
    await send({"type": "http.response.body", "body": _EMPTY_FRAME})
    await send({"type": "http.response.trailers", "headers": _TRAILERS})
