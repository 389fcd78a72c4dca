"""The checkpoints that wait: to be evaluated, or to be tried again after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from understudy.evaluator.settings import EvaluationPolicy
from understudy.evaluator.types import CheckpointInfo

_LONGEST_WAIT_SECONDS = 60.0
_MAX_DOUBLINGS = 20


class Backlog:
    """Returns checkpoints in step order, one at a time. Thread-safe.

    Args:
        policy: ``latest`` skips waiting checkpoints when a newer one waits or is being evaluated; any other policy
            returns all of them.
    """

    def __init__(self, policy: EvaluationPolicy | int) -> None:
        self._policy = policy
        self._changed = threading.Condition()
        self._waiting: dict[int, CheckpointInfo] = {}
        self._given_out: CheckpointInfo | None = None
        self._closed = False

    def offer(self, checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Replace the waiting checkpoints; return the skipped ones, which `next` will not return."""
        with self._changed:
            waiting = {info.step: info for info in checkpoints if info != self._given_out}
            passed_over: list[CheckpointInfo] = []
            if self._policy == "latest" and waiting:
                newest = max(*waiting, -1 if self._given_out is None else self._given_out.step)
                passed_over = [waiting.pop(step) for step in sorted(waiting) if step != newest]
            self._waiting = waiting
            self._changed.notify_all()
            return passed_over

    def next(self) -> CheckpointInfo | None:
        """Wait for the lowest step and return it; None once closed. `finished` must follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            self._given_out = self._waiting.pop(min(self._waiting))
            return self._given_out

    def finished(self) -> None:
        """Mark the checkpoint from `next` as done, for now or permanently."""
        with self._changed:
            self._given_out = None

    def close(self) -> None:
        """Return no more checkpoints."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


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
