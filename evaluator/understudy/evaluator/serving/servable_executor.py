"""Runs work that needs a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from understudy.evaluator.evaluator_errors import DrainingError
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.servable_manager import ServableManager

_T = TypeVar("_T")

Work = Callable[[Handle, Callable[[], bool]], _T]
"""Called with the handle, which it must release or keep, and a function that returns whether the result is wanted."""


class ServableExecutor(Generic[_T]):
    """Waits for checkpoints to be loaded, then runs work on its own threads. Thread-safe.

    Args:
        manager: Loads checkpoints.
        threads: The number of threads.
        name: The name of the threads.
        discard: Called with a result that is no longer wanted.
    """

    def __init__(
        self, manager: ServableManager, *, threads: int, name: str, discard: Callable[[_T], None] | None = None
    ) -> None:
        self._manager = manager
        self._discard = discard
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._closing = False

    def submit(self, step: int, work: Work[_T], *, deadline: float | None) -> Future[_T]:
        """Run work once a step is loaded. Cancelling the future leaves the queue, or tells the work to stop.

        Raises:
            VersionNotFoundError: There is no such checkpoint.
            DrainingError: The evaluator is being closed.
        """
        acquiring = self._manager.acquire(step, deadline=deadline)
        outcome: Future[_T] = Future()
        outcome.add_done_callback(lambda done: done.cancelled() and acquiring.cancel())
        acquiring.add_done_callback(lambda acquired: self._begin(acquired, outcome, work))
        return outcome

    def stop(self) -> None:
        """Tell all work that its result is no longer wanted."""
        self._closing = True

    def close(self) -> None:
        """Wait for all work to end. Call this after `stop`, when the manager's queue is empty."""
        self._executor.shutdown(wait=True)

    def _begin(self, acquired: Future[Handle], outcome: Future[_T], work: Work[_T]) -> None:
        if acquired.cancelled():
            return
        error = acquired.exception()
        if error is not None:
            _fail(outcome, error)
            return
        handle = acquired.result()
        try:
            self._executor.submit(self._work, handle, outcome, work)
        except RuntimeError:
            handle.release()
            _fail(outcome, DrainingError("the evaluator is shutting down"))

    def _work(self, handle: Handle, outcome: Future[_T], work: Work[_T]) -> None:
        try:
            result = work(handle, lambda: not (self._closing or outcome.cancelled()))
        except Exception as error:  # noqa: BLE001 - the future carries it
            handle.release()
            _fail(outcome, error)
            return
        if outcome.set_running_or_notify_cancel():
            outcome.set_result(result)
        elif self._discard is not None:
            self._discard(result)


def _fail(outcome: Future[_T], error: BaseException) -> None:
    if outcome.set_running_or_notify_cancel():
        outcome.set_exception(error)
