"""Notifies open pages of changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Final

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.readiness import Notifier, Readiness, ReadinessState

LOOK_SECONDS: Final = 0.75
"""How often to look for changes that nothing notifies of, such as the states of versions."""
LOOKS_APART_SECONDS: Final = 0.1
"""The shortest time between two looks."""
APART_SECONDS: Final = 0.75
"""The shortest time between two updates of a page."""
KEEP_ALIVE_SECONDS: Final = 15.0
STREAM_SECONDS: Final = 60.0
"""How long a stream lasts at most. The browser then opens another, for which its caller is checked again."""
RETRY_SECONDS: Final = 5.0

_SHORTEST_STREAM: Final = 0.75
"""The shortest stream, as a fraction of the longest, so that pages do not all return at the same time."""


class ChangeFeed:
    """One task looks for changes while pages are open, whatever their number. Belongs to the event loop's thread.

    Args:
        fingerprints: Returns a value for each part, which changes when the part does. Blocks, so it runs on the
            executor.
        recorded: Notifies of new entries of the ledger.
        readiness: The state of the service, whose draining ends every stream.
        executor: Runs blocking calls.
        max_streams: The most open streams.
    """

    def __init__(
        self,
        fingerprints: Callable[[], Mapping[str, object]],
        *,
        recorded: Notifier,
        readiness: Readiness,
        executor: Executor,
        max_streams: int,
    ) -> None:
        self._fingerprints = fingerprints
        self._recorded = recorded
        self._readiness = readiness
        self._executor = executor
        self._max_streams = max_streams
        self._changed = Notifier()
        self._open = 0
        self._polling: asyncio.Task[None] | None = None
        self._changes = 0
        self._changed_at: dict[str, int] = {}
        self._all_changed_at = 0

    @property
    def is_draining(self) -> bool:
        """Whether the service drains."""
        return self._readiness.state is ReadinessState.DRAINING

    def generation(self, part: str) -> int:
        """Return a number that rises with each known change of a part; only while pages are open are all known."""
        return max(self._all_changed_at, self._changed_at.get(part, 0))

    def note_change(self) -> None:
        """Let what is shown from now on have a change that was made just now."""
        self._change_all()
        self._changed.notify()

    def _change_all(self) -> None:
        self._changes += 1
        self._all_changed_at = self._changes

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
        if self._polling is None or self._polling.done():
            self._change_all()  # nothing has looked meanwhile
            self._polling = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._polling.cancel()
                self._polling = None

    async def changes(self) -> AsyncIterator[bool]:
        """Yield True at the start and after changes, and False while there are none, to keep the stream alive.

        Ends when the service drains or the stream has lasted long.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + STREAM_SECONDS * random.uniform(_SHORTEST_STREAM, 1.0)  # noqa: S311 - no secret
        while True:
            changed = self._changed.subscribe()
            if self.is_draining or loop.time() >= ends:
                return
            yield True
            await asyncio.sleep(APART_SECONDS)
            while not await _is_set_within(changed, KEEP_ALIVE_SECONDS):
                if loop.time() >= ends:
                    return
                yield False

    async def _poll(self) -> None:
        """Notify of changes, until this task is cancelled."""
        loop = asyncio.get_running_loop()
        seen: Mapping[str, object] = {}
        state = None
        while True:
            recorded, readiness = self._recorded.subscribe(), self._readiness.changed.subscribe()
            now = await loop.run_in_executor(self._executor, self._fingerprints)
            changed = [part for part, value in now.items() if seen.get(part) != value]
            if state is not self._readiness.state:
                state = self._readiness.state
                self.note_change()
            elif changed:
                self._changes += 1
                self._changed_at |= dict.fromkeys(changed, self._changes)
                self._changed.notify()
            seen = now
            if state is ReadinessState.DRAINING:
                return
            await asyncio.sleep(LOOKS_APART_SECONDS)
            await _first_of(recorded, readiness, seconds=LOOK_SECONDS - LOOKS_APART_SECONDS)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def _first_of(*events: asyncio.Event, seconds: float) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
