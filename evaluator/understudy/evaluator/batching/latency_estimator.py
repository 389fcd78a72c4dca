"""Estimates latency from recent batches."""

from __future__ import annotations

from collections import deque

_REMEMBERED_BATCHES = 16


class LatencyEstimator:
    """Estimates how long queued examples take. Written by one thread at a time, read by any.

    Args:
        max_batch_size: The maximum number of examples of one batch.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._recent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_BATCHES)
        self._recent_large: deque[float] = deque(maxlen=_REMEMBERED_BATCHES)
        self._batch_seconds = 0.0
        self._full_batch_seconds = 0.0

    def observe(self, examples: int, seconds: float) -> None:
        """Add the duration of a batch, including all work of its thread."""
        if examples > self._max_batch_size:
            return
        self._recent.append((examples, seconds))
        self._batch_seconds = sum(seconds for _, seconds in self._recent) / len(self._recent)
        if 2 * examples >= self._max_batch_size:
            self._recent_large.append(seconds)
            self._full_batch_seconds = sum(self._recent_large) / len(self._recent_large)

    def estimate(self, examples: int) -> float:
        """Return how long this many examples are likely to take; 0 without measurements.

        Full batches count as long as recent large batches took, and the rest as long as an average batch.
        """
        full, rest = divmod(examples, self._max_batch_size)
        return full * max(self._batch_seconds, self._full_batch_seconds) + (self._batch_seconds if rest else 0.0)
