"""The body of a request, which also tells whether its sender is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from understudy.service.envoy.asgi import Receive
from understudy.service.envoy.refusals import CallerGoneError


class Body:
    """Chunks of bytes in order. Read by one task at a time.

    What is received is never cancelled, for pyvoy would lose it: who stops waiting leaves it to the next.

    Args:
        receive: ASGI's.
        on_gone: Called when a probe finds that the sender has gone.
    """

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone = on_gone
        self._awaited: asyncio.Future[Mapping[str, Any]] | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the end was read."""
        return self._ended

    async def first(self) -> bytes:
        """Return the first chunk, for a task that nobody cancels; raise CallerGoneError if the sender has gone."""
        return self._chunk_of(await self._ask())

    async def read(self) -> bytes | None:
        """Return the next chunk, or None at the end; raise CallerGoneError if the sender has gone."""
        return None if self._ended else self._chunk_of(await asyncio.shield(self._ask()))

    def probe(self) -> None:
        """Find out whether the sender is still there, unless that is being waited for already."""
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
        self._ended = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk

    def _look_at(self, asked: asyncio.Future[Mapping[str, Any]]) -> None:
        if asked.cancelled():
            return
        if asked.result()["type"] == "http.disconnect":
            self._on_gone()
        elif self._ended and self._awaited is asked:
            self._awaited = None  # after the end come empty messages without end
