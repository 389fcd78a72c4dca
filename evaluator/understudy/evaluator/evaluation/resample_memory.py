"""The memory that the resamples of several evaluations take together."""

from __future__ import annotations

import threading

from understudy.evaluator.evaluator_errors import OverloadedError

MAX_MEMORY = 512 * 2**20
"""The most memory that the states of the resamples of one evaluation take, in bytes."""

_RETRY_SECONDS = 5.0


class ResampleMemory:
    """Bounds the memory of the resamples of several evaluations together. Thread-safe.

    Args:
        most: How many bytes they may hold.
    """

    def __init__(self, most: int = MAX_MEMORY) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._held = 0

    def hold(self, size: int, *, before: int) -> None:
        """Hold this many bytes for an evaluation, in place of those before.

        Raises:
            OverloadedError: All together would hold too many.
        """
        with self._lock:
            if size > before and self._held + size - before > self._most:
                raise OverloadedError(
                    f"the resamples of evaluations hold {self._held} bytes, and {size - before} more would exceed "
                    f"{self._most}; try again, or give fewer resamples or slices",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            self._held += size - before
