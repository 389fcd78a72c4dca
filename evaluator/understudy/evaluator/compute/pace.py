"""How fast the devices are at best, as seen lately."""

from __future__ import annotations

from collections import deque

_REMEMBERED_BATCHES = 64


class Pace:
    """Tells how long rows take at least. Written by one thread, read by any.

    A full batch takes no less than the fastest of those that were at least half full lately, and any batch no less than
    the fastest of all. So what it calls impossible is, unless the devices have become faster than they were.

    Args:
        max_batch_rows: The most rows of one batch.
    """

    def __init__(self, max_batch_rows: int) -> None:
        self._max_batch_rows = max_batch_rows
        self._recent: deque[float] = deque(maxlen=_REMEMBERED_BATCHES)
        self._recent_large: deque[float] = deque(maxlen=_REMEMBERED_BATCHES)
        self._any_seconds = 0.0
        self._large_seconds = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Take a batch into account."""
        if rows > self._max_batch_rows:
            return
        self._recent.append(seconds)
        self._any_seconds = min(self._recent)
        if 2 * rows >= self._max_batch_rows:
            self._recent_large.append(seconds)
            self._large_seconds = min(self._recent_large)

    def least_seconds(self, rows: int) -> float:
        """Return how long this many rows take at least; 0 where nothing is known."""
        full, rest = divmod(rows, self._max_batch_rows)
        return full * max(self._any_seconds, self._large_seconds) + (self._any_seconds if rest else 0.0)
