"""Envoy's admin interface, on a socket that only this user can open."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal

from understudy.service.service_errors import FrontEndError

_TIMEOUT_SECONDS: Final = 5.0
_ASK_SECONDS: Final = 0.02
_BUSY: Final = ("downstream_rq_active", "downstream_cx_tx_bytes_buffered")
_PREFIX: Final = "http.ingress_http."
"""The prefix of pyvoy's statistics; those of the admin interface have another."""


class Admin:
    """Calls Envoy's admin interface.

    Args:
        path: Its socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def until_live(self, seconds: float) -> None:
        """Wait until Envoy listens; raise FrontEndError if it does not."""

        async def live() -> bool:
            try:
                return (await self._ask("GET", "/ready")).startswith(b"LIVE")
            except OSError:
                return False

        if not await _until(live, seconds):
            raise FrontEndError(f"Envoy did not begin to listen within {seconds:g} s; its own log says why")

    async def stop_listening(self) -> None:
        """Stop accepting connections."""
        await self._ask("POST", "/drain_listeners")

    async def until_sent(self, seconds: float) -> None:
        """Wait until every response has left this process, or the time is up."""

        async def sent() -> bool:
            stats = json.loads(await self._ask("GET", f"/stats?format=json&filter={'|'.join(_BUSY)}"))["stats"]
            values = {stat["name"]: stat["value"] for stat in stats if "name" in stat}
            return all(not values.get(_PREFIX + name) for name in _BUSY)

        await _until(sent, seconds)

    async def _ask(self, method: Literal["GET", "POST"], path: str) -> bytes:
        return await asyncio.to_thread(self._ask_blocking, method, path)

    def _ask_blocking(self, method: str, path: str) -> bytes:
        connection = _UnixConnection(self._path)
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_SECONDS)
        self.sock.connect(str(self._path))


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() >= ends:
            return False
        await asyncio.sleep(_ASK_SECONDS)
    return True
