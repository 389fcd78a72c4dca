"""Tells waiting coroutines that something has changed."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes every coroutine that listens. What has changed is for the listener to look up.

    To miss nothing, call `subscribe` first, then look, then wait for what `subscribe` returned. All methods but
    `notify_threadsafe` belong to the event loop's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._notified = asyncio.Event()

    def subscribe(self) -> asyncio.Event:
        """Return the event that the next ring sets."""
        return self._notified

    def notify(self) -> None:
        """Wake every listener."""
        notified, self._notified = self._notified, asyncio.Event()
        notified.set()

    def notify_threadsafe(self) -> None:
        """Wake every listener soon, from any thread; does nothing once the event loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.notify)
