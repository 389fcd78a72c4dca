"""The HTTP port's connections: how many there may be, and how long each may take over the headers of a request."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS: Final = 10.0
"""The longest wait for the headers of a request: the first since its connection began, else since their first byte."""


class HttpConnection(H11Protocol):
    """One connection. uvicorn itself ends only connections that are silent after a response.

    Attributes:
        max_connections: The most connections at once; further ones are closed at once.
    """

    max_connections: ClassVar[int]
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._deadline is None and not self._is_answering():
            self._await_headers()
        super().data_received(data)
        if self._is_answering():
            self._forget_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def limited(protocol: type[HttpConnection], max_connections: int) -> type[HttpConnection]:
    """Return a protocol for a server with this many connections at most."""
    return type(protocol.__name__, (protocol,), {"max_connections": max_connections})
