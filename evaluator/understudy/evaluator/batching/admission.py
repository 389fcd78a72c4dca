"""Admission control: refuses requests before they are queued."""

from __future__ import annotations

import time
from typing import NoReturn

from understudy.evaluator.batching.latency_estimator import LatencyEstimator
from understudy.evaluator.evaluator_errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidInputError,
    OverloadedError,
)
from understudy.evaluator.observer import Observer


class Admission:
    """Refuses requests, and notifies the observer of the reason. Thread-safe.

    Args:
        max_queue_examples: The maximum number of queued examples.
        latency: Estimates the latency of batches.
        observer: Notified of each refusal.
    """

    def __init__(self, max_queue_examples: int, latency: LatencyEstimator, observer: Observer) -> None:
        self._max_queue_examples = max_queue_examples
        self._latency = latency
        self._observer = observer
        self._closing = False

    def close(self) -> None:
        """Refuse all requests from now on."""
        self._closing = True

    def check_size(self, examples: int) -> None:
        """Raise InvalidInputError for more examples than the queue can ever hold."""
        if examples > self._max_queue_examples:
            self._observer.rejected("invalid")
            raise InvalidInputError(
                f"got {examples} examples in one request; at most {self._max_queue_examples} are accepted: split it"
            )

    def check_open(self) -> None:
        """Raise DrainingError after `close`."""
        if self._closing:
            self._observer.rejected("draining")
            raise DrainingError("the evaluator is shutting down and takes no new work; ask another one")

    def is_meetable(self, deadline: float | None, *, examples_ahead: int) -> bool:
        """Return whether a deadline can be met; the arguments are those of `check_deadline`."""
        return deadline is None or time.monotonic() + self._seconds_until_turn(examples_ahead) < deadline

    def check_deadline(self, deadline: float | None, *, examples_ahead: int = 0) -> None:
        """Refuse a request that cannot be done in time.

        Args:
            deadline: On the `time.monotonic` clock, in seconds; None if there is none.
            examples_ahead: The number of examples that are computed before it.

        Raises:
            DeadlineExceededError: The deadline has passed.
            OverloadedError: The deadline is likely to pass before the examples ahead are done.
        """
        if deadline is None:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            self._observer.rejected("deadline")
            raise DeadlineExceededError("the deadline has passed before the work could be queued")
        needed = self._seconds_until_turn(examples_ahead)
        if needed > left:
            self._observer.rejected("unmeetable")
            raise OverloadedError(
                f"{examples_ahead} examples are waiting: the estimated wait {needed:.3f} s exceeds the remaining "
                f"deadline of {left:.3f} s; try again shortly, or with a longer deadline",
                retry_after_seconds=needed,
            )

    def refuse(self, waiting: int) -> NoReturn:
        """Raise OverloadedError, because the queue is full."""
        self._observer.rejected("queue_full")
        retry_after = self._latency.estimate(waiting)
        message = f"{waiting} examples are waiting and at most {self._max_queue_examples} may; try again shortly"
        if retry_after:
            raise OverloadedError(message, retry_after_seconds=retry_after)
        raise OverloadedError(message)

    def _seconds_until_turn(self, examples_ahead: int) -> float:
        return self._latency.estimate(examples_ahead) if examples_ahead else 0.0
