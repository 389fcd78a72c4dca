"""Tells open pages that something has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Final

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.readiness import Notifier, Readiness, ReadinessState

LOOK_SECONDS: Final = 1.0
"""How often to look for changes that nothing notifies of, such as the states of versions."""
APART_SECONDS: Final = 0.25
"""The shortest time between two events."""
KEEP_ALIVE_SECONDS: Final = 15.0
STREAM_SECONDS: Final = 240.0
"""How long a stream lasts. The browser then opens another, for which its caller is checked again."""
RETRY_SECONDS: Final = 5.0

_CHANGED: Final = b"event: changed\ndata: \n\n"
_KEEP_ALIVE: Final = b": open\n\n"
_BEGIN: Final = b"retry: 3000\n\n"


class ChangeFeed:
    """One task looks for changes while pages are open, whatever their number. Belongs to the event loop's thread.

    Args:
        fingerprint: Returns a value that changes when the page does. Blocks, so it runs on the executor.
        recorded: Notifies of new entries of the ledger.
        readiness: The state of the service, whose draining ends every stream.
        executor: Runs blocking calls.
        max_streams: The most open streams.

    Attributes:
        generation: Rises with each change that is known: of those that others make, only while streams are open.
    """

    def __init__(
        self,
        fingerprint: Callable[[], object],
        *,
        recorded: Notifier,
        readiness: Readiness,
        executor: Executor,
        max_streams: int,
    ) -> None:
        self._fingerprint = fingerprint
        self._recorded = recorded
        self._readiness = readiness
        self._executor = executor
        self._max_streams = max_streams
        self._changed = Notifier()
        self._open = 0
        self._looking: asyncio.Task[None] | None = None
        self.generation = 0

    def note_change(self) -> None:
        """Let what is shown from now on have a change that was made just now."""
        self.generation += 1
        self._changed.notify()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count one open stream.

        Raises:
            OverloadedError: There are too many.
        """
        if self._open >= self._max_streams:
            raise OverloadedError(
                f"{self._max_streams} pages are open, which is the limit; reload this one instead",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._open += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._looking.cancel()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield an event at the start and at each change, until the service drains or the stream has lasted long."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + STREAM_SECONDS
        yield _BEGIN + _CHANGED
        while loop.time() < ends:
            changed = self._changed.subscribe()
            if self._readiness.state is ReadinessState.DRAINING:
                return
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    await changed.wait()
            except TimeoutError:
                yield _KEEP_ALIVE
            else:
                yield _CHANGED

    async def _look(self) -> None:
        """Notify of changes, until this task is cancelled."""
        loop = asyncio.get_running_loop()
        seen: object = None
        while True:
            recorded, readiness = self._recorded.subscribe(), self._readiness.changed.subscribe()
            state = self._readiness.state
            now = (state, await loop.run_in_executor(self._executor, self._fingerprint))
            if now != seen:
                seen = now
                self.note_change()
            if state is ReadinessState.DRAINING:
                return
            await asyncio.sleep(APART_SECONDS)
            await _first_of(recorded, readiness, seconds=LOOK_SECONDS - APART_SECONDS)


async def _first_of(*events: asyncio.Event, seconds: float) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
