"""Places for files that are read at once, which connections get in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReadingPlaces:
    """A semaphore whose places go to the connections that wait in turn, however many calls of each wait.

    Belongs to the event loop's thread.

    Args:
        count: How many places there are.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, connection: str) -> AsyncIterator[None]:
        """Wait for a place for a call of a connection, and hold it."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(connection)
        try:
            yield
        finally:
            self._pass_on()

    async def _turn(self, connection: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has got the place in the same moment
                self._pass_on()
            else:
                self._waiting[connection].remove(turn)
                if not self._waiting[connection]:
                    del self._waiting[connection]
            raise

    def _pass_on(self) -> None:
        """Give a place to the next connection that waits."""
        for connection, turns in self._waiting.items():
            turn = next((each for each in turns if not each.done()), None)
            if turn is not None:
                turns.remove(turn)
                self._waiting.move_to_end(connection)
                if not turns:
                    del self._waiting[connection]
                turn.set_result(None)
                return
        self._free += 1
