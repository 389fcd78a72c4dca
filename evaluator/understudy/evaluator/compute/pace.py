"""How fast batches are done, as seen lately."""

from __future__ import annotations

from collections import deque

_REMEMBERED_BATCHES = 16


class Pace:
    """Estimates how long rows take that wait. Written by one thread at a time, read by any.

    Args:
        max_batch_rows: The most rows of one batch.
    """

    def __init__(self, max_batch_rows: int) -> None:
        self._max_batch_rows = max_batch_rows
        self._recent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_BATCHES)
        self._recent_large: deque[float] = deque(maxlen=_REMEMBERED_BATCHES)
        self._batch_seconds = 0.0
        self._full_batch_seconds = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Take a batch into account, with all that its thread did for it."""
        if rows > self._max_batch_rows:
            return
        self._recent.append((rows, seconds))
        self._batch_seconds = sum(seconds for _, seconds in self._recent) / len(self._recent)
        if 2 * rows >= self._max_batch_rows:
            self._recent_large.append(seconds)
            self._full_batch_seconds = sum(self._recent_large) / len(self._recent_large)

    def seconds(self, rows: int) -> float:
        """Return how long this many rows are likely to take; 0 where nothing is known.

        Full batches take as long as the large ones did lately, and what is left over as long as any.
        """
        full, rest = divmod(rows, self._max_batch_rows)
        return full * max(self._batch_seconds, self._full_batch_seconds) + (self._batch_seconds if rest else 0.0)
