"""Failures: the reason, the number of attempts, and the time of the next attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

_LONGEST_WAIT_SECONDS = 60.0
_MAX_DOUBLINGS = 20


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failures of a checkpoint, or of a checkpoint on a dataset.

    Attributes:
        reason: Why the last attempt failed.
        attempts: The number of attempts.
        retry_at: When to try again, on the quarantine's clock; None after the last attempt.
        postponed: How many times in a row it was postponed for an external cause.
    """

    reason: str
    attempts: int
    retry_at: float | None
    postponed: int = 0

    @property
    def given_up(self) -> bool:
        """Whether there are no more attempts."""
        return self.retry_at is None


class Quarantine:
    """Delays retries of failed keys with exponential backoff. Thread-safe.

    Args:
        attempts: The maximum number of attempts.
        retry_seconds: The delay before the second attempt; it doubles with each attempt.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, *, attempts: int, retry_seconds: float, clock: Callable[[], float]) -> None:
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[Hashable, Failure] = {}

    def add(self, key: Hashable, reason: str, *, permanent: bool = False) -> Failure:
        """Count a failure; give up if it is permanent or was the last attempt."""
        with self._lock:
            previous = self._failures.get(key)
            attempts = 1 + (previous.attempts if previous else 0)
            given_up = permanent or attempts >= self._attempts
            retry_at = None if given_up else self._clock() + self._retry_seconds * 2 ** (attempts - 1)
            failure = Failure(reason=reason, attempts=attempts, retry_at=retry_at)
            self._failures[key] = failure
            return failure

    def postpone(self, key: Hashable, reason: str) -> Failure:
        """Postpone the next attempt without counting this one, each time for longer, up to a minute."""
        with self._lock:
            previous = self._failures.get(key)
            postponed = previous.postponed if previous else 0
            wait = min(self._retry_seconds * 2 ** min(postponed, _MAX_DOUBLINGS), _LONGEST_WAIT_SECONDS)
            failure = Failure(
                reason=reason,
                attempts=previous.attempts if previous else 0,
                retry_at=self._clock() + wait,
                postponed=postponed + 1,
            )
            self._failures[key] = failure
            return failure

    def clear(self, key: Hashable) -> None:
        """Forget all failures of a key, after a success."""
        with self._lock:
            self._failures.pop(key, None)

    def failure(self, key: Hashable) -> Failure | None:
        """Return the failure of a key, or None if it never failed."""
        return self._failures.get(key)  # without the lock: called for every checkpoint in every pass

    def admits(self, key: Hashable) -> bool:
        """Return whether a key may be tried now."""
        failure = self.failure(key)
        return failure is None or (failure.retry_at is not None and failure.retry_at <= self._clock())

    def seconds_to_next_retry(self) -> float | None:
        """Return the time until the next retry (0 if one is due), or None if there is none."""
        with self._lock:
            times = [failure.retry_at for failure in self._failures.values() if failure.retry_at is not None]
        return max(0.0, min(times) - self._clock()) if times else None
