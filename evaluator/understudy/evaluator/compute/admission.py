"""What is refused before it waits."""

from __future__ import annotations

import time
from typing import NoReturn

from understudy.evaluator.compute.pace import Pace
from understudy.evaluator.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidInputError,
    OverloadedError,
)
from understudy.evaluator.observer import Observer


class Admission:
    """Refuses requests, and tells the observer why. Thread-safe.

    Args:
        max_queue_rows: The most rows that may wait.
        pace: How fast the devices are.
        observer: Told of each refusal.
    """

    def __init__(self, max_queue_rows: int, pace: Pace, observer: Observer) -> None:
        self._max_queue_rows = max_queue_rows
        self._pace = pace
        self._observer = observer
        self._closing = False

    def close(self) -> None:
        """Let nobody in any more."""
        self._closing = True

    def check_size(self, rows: int) -> None:
        """Raise InvalidInputError for more rows than can ever wait."""
        if rows > self._max_queue_rows:
            self._observer.rejected("invalid")
            raise InvalidInputError(
                f"{rows} rows came in one request; at most {self._max_queue_rows} are taken: split it"
            )

    def check_open(self) -> None:
        """Raise DrainingError when the end has come."""
        if self._closing:
            self._observer.rejected("draining")
            raise DrainingError("the evaluator is shutting down and takes no new work; ask another one")

    def is_meetable(self, deadline: float | None, *, rows_ahead: int) -> bool:
        """Return whether a deadline may be met; the arguments are those of `check_deadline`."""
        return deadline is None or time.monotonic() + self._seconds_until_turn(rows_ahead) < deadline

    def check_deadline(self, deadline: float | None, *, rows_ahead: int = 0) -> None:
        """Refuse what cannot be done in time.

        Args:
            deadline: On `time.monotonic`'s clock, in seconds; None if there is none.
            rows_ahead: The rows that are computed before it.

        Raises:
            DeadlineExceededError: The deadline has passed.
            OverloadedError: It is likely to, before those ahead are done.
        """
        if deadline is None:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            self._observer.rejected("deadline")
            raise DeadlineExceededError("the deadline has passed before the work could be queued")
        needed = self._seconds_until_turn(rows_ahead)
        if needed > left:
            self._observer.rejected("unmeetable")
            raise OverloadedError(
                f"{rows_ahead} rows are waiting, which takes {needed:.3f} s as things go, and {left:.3f} s are left; "
                "try again shortly, or with more time",
                retry_after_seconds=needed,
            )

    def refuse(self, waiting: int) -> NoReturn:
        """Raise OverloadedError, because the queue is full."""
        self._observer.rejected("queue_full")
        retry_after = self._pace.seconds(waiting)
        message = f"{waiting} rows are waiting and at most {self._max_queue_rows} may; try again shortly"
        if retry_after:
            raise OverloadedError(message, retry_after_seconds=retry_after)
        raise OverloadedError(message)

    def _seconds_until_turn(self, rows_ahead: int) -> float:
        return self._pace.seconds(rows_ahead) if rows_ahead else 0.0
