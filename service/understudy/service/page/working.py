"""Something that is computed while a page tells how far it is.

The page is sent in pieces, which a browser shows as they come, so it needs no script: by the style sheet each line
hides the one before. To leave the page is to cancel the computation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from starlette.responses import Response

QUICK_SECONDS = 0.5
"""What takes no longer than this is answered at once, without such a page."""
TELL_SECONDS = 1.0
"""How often the page tells how far it is."""
LONGEST_SECONDS: Final = 3600.0
"""How long it may take in all."""


class Progress:
    """How many examples are scored, and the time left. Thread-safe.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._latest: tuple[float, int, int | None] | None = None

    def report(self, examples: int, total: int | None) -> None:
        """Take how many examples are scored, of how many if that is known."""
        now = self._clock()
        if self._first is None:
            self._first = now, examples
        self._latest = now, examples, total

    @property
    def examples(self) -> int:
        """How many examples are scored."""
        return 0 if self._latest is None else self._latest[1]

    @property
    def total(self) -> int | None:
        """How many there are; None if that is not known."""
        return None if self._latest is None else self._latest[2]

    @property
    def remaining_seconds(self) -> float | None:
        """How long the others take at the rate since the first report; None if that is not known."""
        if self._first is None or self._latest is None:
            return None
        (began, before), (now, examples, total) = self._first, self._latest
        if total is None or examples <= before:
            return None
        rate = (examples - before) / max(now - began, 1e-9)
        return max(0.0, (total - examples) / rate)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was computed: as an answer of its own, and as the end of a page that told how far it was."""

    response: Response
    html: str


Work = Callable[[Progress], Awaitable[Outcome]]
"""Computes something, and reports how far it is."""


class Working:
    """Something that is computed on a task of its own, and is cancelled at the end of a ``with`` block.

    Args:
        work: Computes it.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self.progress = Progress()
        self._task: asyncio.Task[Outcome] | None = None

    async def __aenter__(self) -> asyncio.Task[Outcome]:
        """Begin, and wait for a moment, which may be long enough."""
        self._task = asyncio.ensure_future(self._begun())
        try:
            await asyncio.wait([self._task], timeout=QUICK_SECONDS)
        except asyncio.CancelledError:
            await self._end(self._task)
            raise
        return self._task

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await self._end(self._task)

    async def lines(self, task: asyncio.Task[Outcome], line: Callable[[Progress], str]) -> AsyncGenerator[str, None]:
        """Yield a line at the start and whenever something is done, until it has ended."""
        said = ""
        while not task.done():
            text = line(self.progress)
            if text != said:
                said = text
                yield text
            await asyncio.wait([task], timeout=TELL_SECONDS)

    async def _begun(self) -> Outcome:
        return await self._work(self.progress)

    @staticmethod
    async def _end(task: asyncio.Task[Outcome]) -> None:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
