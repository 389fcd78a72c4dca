"""The end of the evaluator's threads, and the thread that follows which version serves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


def join(thread: threading.Thread, timeout_seconds: float, *, error: str) -> None:
    """Wait until a thread has ended, if it was started.

    Raises:
        TimeoutError: It did not end in time. The text is ``error`` with the seconds.
    """
    if thread.ident is not None:
        thread.join(timeout_seconds)
    if thread.is_alive():
        raise TimeoutError(f"{error} {timeout_seconds} s")


class Promotion(NamedTuple):
    """A version that begins to serve. The numbers ascend from 1."""

    number: int
    step: int


class PromotionThread:
    """Works on each version that begins to serve, on a thread; of several during the work only on the newest.

    Thread-safe.

    Args:
        name: The name of the thread.
        work: Called with each promotion. It must not raise, and end soon when it is not wanted any more.
    """

    def __init__(self, name: str, work: Callable[[Promotion], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._newest = Promotion(0, 0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def promoted(self, step: int) -> None:
        """Work on this version. Does not block."""
        with self._changed:
            self._newest = Promotion(self._newest.number + 1, step)
            self._changed.notify_all()

    @property
    def newest(self) -> Promotion | None:
        """The newest promotion; None once the thread is being closed."""
        return None if self._closing else self._newest

    def has_settled(self, is_wanted: Callable[[], bool], seconds: float) -> bool:
        """Wait; return whether the work is still wanted after these seconds. It is asked at each promotion."""
        with self._changed:
            return not self._changed.wait_for(lambda: not is_wanted(), seconds)

    def close(self, timeout_seconds: float, *, error: str) -> None:
        """End the thread, if it was started; see `join`. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        join(self._thread, timeout_seconds, error=error)

    def _run(self) -> None:
        last = 0
        while (promotion := self._next(last)) is not None:
            last = promotion.number
            self._work(promotion)

    def _next(self, last: int) -> Promotion | None:
        """Wait for a promotion after the last one; return None if the thread is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._newest.number != last)
            return self.newest
