"""Notifies waiting coroutines of changes."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes every subscribed coroutine, which then reads the changed state itself.

    To miss no change, call `subscribe` first, then read the state, then wait for the event. All methods but
    `notify_threadsafe` belong to the event loop's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._notified = asyncio.Event()

    def subscribe(self) -> asyncio.Event:
        """Return the event that the next notification sets."""
        return self._notified

    def notify(self) -> None:
        """Wake every subscriber."""
        notified, self._notified = self._notified, asyncio.Event()
        notified.set()

    def notify_threadsafe(self) -> None:
        """Wake every subscriber soon, from any thread; does nothing once the event loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.notify)
