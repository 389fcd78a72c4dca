"""When to resume a broken watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from understudy.clients.client_errors import (
    CancelledError,
    DeadlineExceededError,
    UnavailableError,
    UnderstudyError,
)

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0


class Reconnection:
    """Decides after each failure of a stream whether to retry, and how long to wait first.

    Args:
        give_up_after_seconds: How long servers may be unavailable without interruption.
        clock: Returns monotonic time in seconds.
    """

    def __init__(self, give_up_after_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._give_up_after_seconds = give_up_after_seconds
        self._clock = clock
        self._away_since: float | None = None
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def connected(self) -> None:
        """Record that the server responded."""
        self._away_since = None
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def pause_after(self, error: UnderstudyError) -> float:
        """Return how many seconds to wait before the next attempt.

        Raises:
            UnderstudyError: The error itself, if it is not retryable or retries have failed for too long.
        """
        if isinstance(error, DeadlineExceededError):  # the stream's own timeout, after a long time without an entry
            self.connected()
            return 0.0
        now = self._clock()
        self._away_since = now if self._away_since is None else self._away_since
        if (
            not isinstance(error, UnavailableError | CancelledError)
            or now - self._away_since >= self._give_up_after_seconds
        ):
            raise error
        pause, self._pause_seconds = self._pause_seconds, min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        return pause
