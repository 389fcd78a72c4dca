"""Tells waiting coroutines that something has changed."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes every coroutine that listens. What has changed is for the listener to look up.

    To miss nothing, call `listen` first, then look, then wait for what `listen` returned. All methods but
    `ring_from_thread` belong to the event loop's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """Return the event that the next ring sets."""
        return self._rung

    def ring(self) -> None:
        """Wake every listener."""
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    def ring_from_thread(self) -> None:
        """Wake every listener soon, from any thread; does nothing once the event loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.ring)
