"""A caller's stream that tests script."""

from __future__ import annotations

import asyncio
from typing import Any, Self


class CallerStream:
    """A caller's stream: sends what it is given, ends when told."""

    def __init__(self, *messages: Any, end: bool = False) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.taken = 0
        for message in messages:
            self.send(message)
        if end:
            self.end()

    def send(self, message: Any) -> None:
        self._queue.put_nowait(message)

    def end(self) -> None:
        self._queue.put_nowait(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if (message := await self._queue.get()) is None:
            raise StopAsyncIteration
        self.taken += 1
        return message
