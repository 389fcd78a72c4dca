"""A page that tells how far something is while it is computed, also without JavaScript: the browser shows it as it comes.

Each line takes the place of the one before by the style sheet. Who leaves the page cancels what it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from typing import Final

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


async def told(
    working: asyncio.Future[str], progress: Progress, *, page: tuple[str, str], line: Callable[[Progress], str]
) -> AsyncIterator[str]:
    """Yield the parts of a page: its beginning, a line whenever something is done, at last the result and its end.

    Args:
        working: Gives the HTML of the result. It is cancelled if nothing reads on.
        progress: How far it is.
        page: The HTML before and after.
        line: Returns the HTML of a line.

    Raises:
        Exception: What ``working`` raises.
    """
    try:
        yield page[0]
        said = ""
        while not working.done():
            text = line(progress)
            if text != said:
                said = text
                yield text
            await asyncio.wait([working], timeout=TELL_SECONDS)
        yield working.result()
        yield page[1]
    finally:
        await cancelled(working)


async def is_quick(working: asyncio.Future[str]) -> bool:
    """Wait for something for a moment; return whether it is done. It is cancelled with this."""
    try:
        await asyncio.wait([working], timeout=QUICK_SECONDS)
    except asyncio.CancelledError:
        await cancelled(working)
        raise
    return working.done()


async def cancelled(working: asyncio.Future[str]) -> None:
    """Cancel something, and wait until it has ended."""
    if not working.done():
        working.cancel()
        await asyncio.wait([working])


Work = Callable[[], Awaitable[str]]
"""Computes something, and returns the HTML of the result."""
