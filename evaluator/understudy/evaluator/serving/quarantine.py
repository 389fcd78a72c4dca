"""The checkpoints that failed, and when each is tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sortedcontainers import SortedSet

from understudy.checkpoints.pauses import doubling_pause
from understudy.evaluator.step_changes import StepChanges

_LONGEST_WAIT_SECONDS = 60.0

FailureKey = tuple[int, *tuple[str, ...]]
"""What failed: the step and digest of a checkpoint, and a dataset if the checkpoint failed on that."""


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

    Attributes:
        changes: Notes the steps that fail, succeed, or are due.
    """

    def __init__(self, *, attempts: int, retry_seconds: float, clock: Callable[[], float]) -> None:
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[FailureKey, Failure] = {}
        self._retries: SortedSet[tuple[float, FailureKey]] = SortedSet()
        self.changes = StepChanges()

    def add(self, key: FailureKey, reason: str, *, permanent: bool = False) -> Failure:
        """Count a failure; give up if it is permanent or was the last attempt."""
        with self._lock:
            previous = self._failures.get(key)
            attempts = 1 + (previous.attempts if previous else 0)
            given_up = permanent or attempts >= self._attempts
            retry_at = None if given_up else self._clock() + self._retry_seconds * 2 ** (attempts - 1)
            failure = Failure(reason=_as_text(reason), attempts=attempts, retry_at=retry_at)
            self._replace(key, failure)
        self.changes.note(key[0])
        return failure

    def postpone(self, key: FailureKey, reason: str) -> Failure:
        """Postpone the next attempt without counting this one, each time for longer, up to a minute."""
        with self._lock:
            previous = self._failures.get(key)
            postponed = previous.postponed if previous else 0
            wait = doubling_pause(postponed, first=self._retry_seconds, longest=_LONGEST_WAIT_SECONDS)
            failure = Failure(
                reason=_as_text(reason),
                attempts=previous.attempts if previous else 0,
                retry_at=self._clock() + wait,
                postponed=postponed + 1,
            )
            self._replace(key, failure)
        self.changes.note(key[0])
        return failure

    def clear(self, key: FailureKey) -> None:
        """Forget all failures of a key, after a success."""
        with self._lock:
            self._replace(key, None)
        self.changes.note(key[0])

    def _replace(self, key: FailureKey, failure: Failure | None) -> None:
        previous = self._failures.pop(key, None)
        if previous is not None and previous.retry_at is not None:
            self._retries.discard((previous.retry_at, key))
        if failure is not None:
            self._failures[key] = failure
            if failure.retry_at is not None:
                self._retries.add((failure.retry_at, key))

    def failure(self, key: FailureKey) -> Failure | None:
        """Return the failure of a key, or None if it never failed."""
        return self._failures.get(key)

    def admits(self, key: FailureKey) -> bool:
        """Return whether a key may be tried now."""
        failure = self.failure(key)
        return failure is None or (failure.retry_at is not None and failure.retry_at <= self._clock())

    def is_given_up(self, key: FailureKey) -> bool:
        """Return whether a key failed and there are no more attempts."""
        failure = self.failure(key)
        return failure is not None and failure.given_up

    def note_due(self) -> None:
        """Note each step whose retry is due by now, once."""
        due = []
        with self._lock:
            while self._retries and self._retries[0][0] <= self._clock():
                due.append(self._retries.pop(0)[1][0])
        self.changes.note(*due)

    def seconds_to_next_retry(self) -> float | None:
        """Return the time until the next retry that `note_due` has not noted (0 if it is due), or None."""
        with self._lock:
            return max(0.0, self._retries[0][0] - self._clock()) if self._retries else None


def _as_text(reason: str) -> str:
    """Return a reason that can be stored and sent: it may quote names of files and layers that are no text."""
    return reason.encode(errors="backslashreplace").decode()
