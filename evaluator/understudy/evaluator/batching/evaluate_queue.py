"""The work of evaluations on its way to the devices: admission, slow preparation, and the wait for room."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from understudy.evaluator.batching.request_queue import Admission, QueuedEvaluate, Refusal, raise_refusal
from understudy.evaluator.evaluator_errors import OverloadedError, blame_machine, without_frames
from understudy.evaluator.observer import Observer

_T = TypeVar("_T")


class EvaluateQueue:
    """Queues the work of evaluations, which the engine runs on the device's thread. Thread-safe.

    Args:
        evaluates: The queue, which the engine empties.
        admission: Decides what may be queued.
        observer: Notified of rejections.
        lock: The engine's.
        changed: The engine's condition of that lock, notified of each work that is queued.
    """

    def __init__(
        self,
        evaluates: deque[QueuedEvaluate],
        admission: Admission,
        observer: Observer,
        *,
        lock: threading.RLock,
        changed: threading.Condition,
    ) -> None:
        self._evaluates = evaluates
        self._admission = admission
        self._observer = observer
        self._changed = changed
        self._room = threading.Condition(lock)
        self._preparer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="understudy-prepare")

    def run(
        self,
        work: Callable[[], _T],
        *,
        examples: int,
        deadline: float | None = None,
        prepare: Callable[[], object] | None = None,
        trial: Callable[[], object] | None = None,
    ) -> Future[_T]:
        """Queue work of an evaluation, to run on the device's thread in the order of arrival.

        Args:
            work: The function to run.
            examples: The number of examples that it computes.
            deadline: When it is no longer wanted.
            prepare: Slow preparation, such as tracing; runs on a separate thread, one after another.
            trial: Runs the same model on generated data, to tell a failing device from values that the model's own code
                does not take; None if the work is such a run.

        Raises:
            OverloadedError: Too many examples are queued. Not raised with ``prepare``, after which the work waits.
            DeadlineExceededError: The deadline has passed. With ``prepare``, this is the future's exception.
            DrainingError: The engine is being closed. With ``prepare``, this is the future's exception.
        """
        request = QueuedEvaluate(
            work=work,
            prepare=prepare,
            trial=trial,
            examples=examples,
            deadline=deadline,
            arrived=time.monotonic(),
            future=Future(),
        )
        if prepare is None:
            self._enqueue(request)
        else:
            with self._changed:
                raise_refusal(self._admission.evaluate(examples, None, waiting=0), self._observer)
                request.future.add_done_callback(request.forget)
                self._preparer.submit(self._prepare_and_enqueue, request)
        return request.future

    def _enqueue(self, request: QueuedEvaluate) -> None:
        with self._changed:
            raise_refusal(self._refusal(request), self._observer)
            request.future.add_done_callback(request.forget)
            self._append(request)

    def _append(self, request: QueuedEvaluate) -> None:
        self._evaluates.append(request)
        self._changed.notify()

    def _refusal(self, request: QueuedEvaluate) -> Refusal | None:
        waiting = sum(other.examples for other in self._evaluates)
        return self._admission.evaluate(request.examples, request.deadline, waiting=waiting)

    def _prepare_and_enqueue(self, request: QueuedEvaluate) -> None:
        prepare = request.prepare
        if prepare is None:  # cancelled
            return
        try:
            prepare()
            del prepare
            request.future.add_done_callback(self.notify_room)
            self._enqueue_when_there_is_room(request)
        except Exception as error:  # noqa: BLE001 - it is recorded in the future
            if request.begin():
                request.fail(without_frames(blame_machine(error)))

    def _enqueue_when_there_is_room(self, request: QueuedEvaluate) -> None:
        """Wait until a request fits into the queue, and queue it unless it is cancelled meanwhile."""
        with self._changed:
            while not request.is_cancelled():
                refusal = self._refusal(request)
                if refusal is None:
                    self._append(request)
                    return
                if not isinstance(refusal.error, OverloadedError):
                    raise_refusal(refusal, self._observer)
                self._room.wait(None if request.deadline is None else request.deadline - time.monotonic())

    def notify_room(self, _: object = None) -> None:
        """Wake what waits for room in the queue, because there may be some."""
        with self._room:
            self._room.notify_all()

    def join(self) -> None:
        """Wait until all preparation has ended. Call this when the engine refuses work."""
        self._preparer.shutdown(wait=True, cancel_futures=False)
