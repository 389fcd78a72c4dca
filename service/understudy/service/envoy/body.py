"""The body of a request, which also detects that its sender has gone."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from understudy.service.envoy.asgi import Receive
from understudy.service.envoy.refusals import CallerGoneError


class Body(ABC):
    """Chunks of bytes in order. Read by one task at a time.

    A pending receive is never cancelled, since pyvoy would lose its message; the next reader gets it.

    Args:
        receive: The ASGI receive function.
    """

    __slots__ = ("_awaited", "_receive", "body_ended")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._awaited: asyncio.Future[Mapping[str, Any]] | None = None
        self.body_ended = False

    @abstractmethod
    def gone(self) -> None:
        """React to a probe that found the sender gone."""

    async def first_chunk(self) -> bytes:
        """Return the first chunk, for a task that is never cancelled; raise CallerGoneError if the sender has gone."""
        return self._chunk_of(await self._ask())

    async def next_chunk(self) -> bytes | None:
        """Return the next chunk, or None at the end; raise CallerGoneError if the sender has gone."""
        return None if self.body_ended else self._chunk_of(await asyncio.shield(self._ask()))

    def ask(self) -> None:
        """Probe whether the sender is still there, unless a receive is pending already."""
        if self._awaited is None:
            self._ask().add_done_callback(self._look_at)

    def _ask(self) -> asyncio.Future[Mapping[str, Any]]:
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

    def _look_at(self, asked: asyncio.Future[Mapping[str, Any]]) -> None:
        if asked.cancelled():
            return
        if asked.result()["type"] == "http.disconnect":
            self.gone()
        elif self.body_ended and self._awaited is asked:
            self._awaited = None  # after the end, ASGI returns empty messages
