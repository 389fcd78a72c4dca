"""Merges queued requests into batches, and runs all work on the threads of the devices."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from understudy.evaluator.batching.batch_runner import BatchRunner, DeviceThread, InlineJudge, Job, do
from understudy.evaluator.batching.device_health import DeviceHealth
from understudy.evaluator.batching.evaluate_queue import EvaluateQueue
from understudy.evaluator.batching.request_queue import (
    MAX_PREDICTS_BEFORE_EVALUATE,
    Admission,
    BatchScheduler,
    Borrow,
    LatencyEstimator,
    PredictQueue,
    QueuedPredict,
    Refusal,
    is_dead,
    raise_refusal,
    size_of,
)
from understudy.evaluator.evaluator_errors import DrainingError, OverloadedError
from understudy.evaluator.observer import Observer
from understudy.evaluator.types import Arrays, CallerKey, DeviceListener, ResultSink, this_process

_SECONDS_BETWEEN_SWEEPS = 0.05
_Token = TypeVar("_Token")


def _newcomer() -> Hashable:
    """Return the key of a caller that has nothing waiting."""
    return None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Batching and queueing options.

    Attributes:
        max_batch_size: The maximum number of examples of one batch. A larger request is a separate batch.
        max_queue_examples: The maximum number of queued examples, for Predict and for Evaluate each. For Predict there
            is an eighth more, for callers that have little waiting; see `Reserve`.
        max_queue_bytes: The most bytes that the inputs of queued Predict requests may take, with an eighth more as
            above; one that waits alone may have more.
        max_batch_delay_seconds: How long the oldest request may wait for more requests to fill its batch.
        gathering_seconds: How long an idle device waits for as many requests as there were before: those of the last
            batch, and those that waited when it was done. A lone request after a lone request does not wait.
        inline_batches: Whether a brief batch may run on the thread that calls `Engine.dispatch`.
        max_device_failures: The number of consecutive runs that fail because of a device before the state is
            ``FAILING``.
        concurrent_batches: How many Predict batches may run at the same time, on threads of their own. What is queued
            is shared out over the idle threads, unless the shares are brief: they would cost more CPU time than they
            save. Work of evaluations still runs one at a time. Has no effect with ``overlap_batches``.
        overlap_batches: Whether to launch the next batch before the results of the current one are fetched, for
            devices that compute asynchronously. Has no effect if ``max_batch_delay_seconds`` is above 0.
    """

    max_batch_size: int = 256
    max_queue_examples: int = 4096
    max_queue_bytes: int = 1 << 30
    max_batch_delay_seconds: float = 0.0
    gathering_seconds: float = 0.0
    inline_batches: bool = True
    max_device_failures: int = 5
    concurrent_batches: int = 1
    overlap_batches: bool = False


class Engine:
    """The batch queue, and the thread that calls the devices. Thread-safe.

    A request that arrives while the devices are idle runs at once; requests that arrive during a batch form the next.
    Predict takes precedence over Evaluate, but not more than `MAX_PREDICTS_BEFORE_EVALUATE` times in a row. Cancelled
    requests, and those past their deadline, are dropped before they reach a device.

    Batches run on the engine's thread, one at a time, or two if they overlap. With ``concurrent_batches``, more threads
    take requests that wait while the first one is busy. If the settings allow it, a batch that takes less time than
    waking that thread runs on the thread that calls `dispatch`; `InlineJudge` decides.

    Deadlines are on the `time.monotonic` clock, in seconds; None means none.

    Args:
        settings: Batching and queueing options.
        observer: Notified of batches, of the length of the queue, and of rejections.
        on_device_state: Called when the devices begin to fail, recover, or fail permanently.

    Attributes:
        run: Queues work of an evaluation; see `EvaluateQueue.run`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        observer: Observer,
        *,
        on_device_state: DeviceListener = lambda _state, _error: None,
    ) -> None:
        self._settings = settings
        self._observer = observer
        self._latency = LatencyEstimator(settings.max_batch_size, settings.concurrent_batches)
        self._admission = Admission(settings.max_queue_examples, self._latency)
        self._swept_at = -math.inf
        self._judge = InlineJudge()
        health = DeviceHealth(settings.max_device_failures, on_device_state)
        self._runner = BatchRunner(observer, self._latency, self._judge, health)
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._extra_work = threading.Condition(lock)
        queue = PredictQueue(settings.max_queue_examples, settings.max_queue_bytes)
        self._scheduler = BatchScheduler(settings.max_batch_size, queue)
        self._last_requests = 0
        self._first_is_brief = False
        self._closing = False
        self._evaluations = EvaluateQueue(
            self._scheduler.evaluates, self._admission, observer, lock=lock, changed=self._changed
        )
        self.run = self._evaluations.run
        self._thread = DeviceThread(wait=self._wait, next_job=self._next_job)
        self._extra_threads: list[DeviceThread] = []
        self._thread.start()
        self._start_extra_threads()

    @property
    def settings(self) -> EngineSettings:
        """The present options."""
        return self._settings

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued or computed now."""
        return bool(self._scheduler) or any(thread.is_busy for thread in (self._thread, *self._extra_threads))

    def set_batching(self, *, max_batch_size: int, gathering_seconds: float, concurrent_batches: int) -> None:
        """Change these settings; the batches that are formed from now on follow them."""
        with self._changed:
            self._settings = replace(
                self._settings,
                max_batch_size=max_batch_size,
                gathering_seconds=gathering_seconds,
                concurrent_batches=concurrent_batches,
            )
            self._scheduler.max_batch_size = max_batch_size
            self._latency.max_batch_size = max_batch_size
            self._latency.concurrent_batches = concurrent_batches
            self._start_extra_threads()

    def submit(
        self,
        inputs: Arrays,
        *,
        borrow: Borrow,
        key: Hashable,
        deadline: float | None,
        token: _Token,
        sink: ResultSink[_Token],
        caller: CallerKey = this_process,
        dispatch: bool = True,
    ) -> None:
        """Queue examples to predict.

        Args:
            inputs: Every input by name, ``[examples, ...]``, already checked. Do not change them until the outcome is
                delivered.
            borrow: Called once for each batch, on the device's thread, when the batch is formed.
            key: The version. Only requests with equal keys, dtypes and shapes (except axis 0) share a batch.
            deadline: When the answer is no longer wanted.
            token: Opaque token that identifies the caller.
            sink: Receives the outcome, together with those of the other requests of the batch with the same sink.
            caller: Who asks. If the queue is full, those that have little waiting are still admitted.
            dispatch: Whether to wake an idle device. If False, call `dispatch` soon.

        Raises:
            InvalidInputError: There are more examples than the queue can ever hold.
            OverloadedError: The queue is full, or the deadline would pass before the queued requests are done.
            DeadlineExceededError: The deadline has passed.
            DrainingError: The engine is being closed.
        """
        request = QueuedPredict(
            inputs=inputs,
            examples=len(next(iter(inputs.values()))),
            group=(key, *[(name, array.dtype, array.shape[1:]) for name, array in sorted(inputs.items())]),
            borrow=borrow,
            deadline=deadline,
            arrived=time.monotonic(),
            token=token,
            sink=sink,
            size=size_of(inputs),
        )
        dead: Sequence[QueuedPredict] = ()
        try:
            with self._changed:
                refusal = self._predict_refusal(request.examples, request.size, deadline, caller)
                if refusal is not None and self._may_clear(refusal):
                    dead = self._sweep()
                    refusal = self._predict_refusal(request.examples, request.size, deadline, caller)
                raise_refusal(refusal, self._observer)
                if self._scheduler.predicts.is_full_for(request.examples, request.size):
                    request.reserved_by = caller()
                self._scheduler.predicts.append(request)
                if dispatch:
                    self._wake()
                self._observer.queue_changed(self._scheduler.predicts.examples)
        finally:
            for unwanted in dead:
                self._runner.begin(unwanted)

    def check_admission(self, deadline: float | None, *, examples: int = 1, caller: CallerKey = _newcomer) -> None:
        """Raise as `submit` does for overload, the deadline, the size or shutdown, before the request exists.

        Without ``caller``, it may be one that has nothing waiting.
        """
        refusal = self._predict_refusal(examples, 0, deadline, caller)
        if refusal is not None and not self._may_clear(refusal):
            raise_refusal(refusal, self._observer)

    def dispatch(self) -> None:
        """Run the submitted requests if the device is idle: on this thread if they are brief."""
        if self._may_run_here():
            self._thread.do_here(self._take_brief_predicts)
        if self._scheduler.predicts:
            with self._changed:
                self._wake()

    def yield_to_predict(self) -> None:
        """Run the queued Predict batches, at most `MAX_PREDICTS_BEFORE_EVALUATE`.

        The work of an evaluation calls this on the device's thread, between parts of a large batch.
        """
        for _ in range(MAX_PREDICTS_BEFORE_EVALUATE):
            if not self._scheduler.predicts:
                return
            do(self._extra_predict_job())

    def close(self, timeout_seconds: float) -> None:
        """Refuse new work, finish queued work, and end the threads. Idempotent.

        Work that is still queued after the timeout fails with DrainingError.
        """
        with self._changed:
            self._closing = True
            self._admission.close()
            self._changed.notify()
            self._extra_work.notify_all()
            self._evaluations.notify_room()
        ends = time.monotonic() + timeout_seconds
        for thread in (self._thread, *self._extra_threads):
            thread.join(max(0.0, ends - time.monotonic()))
        with self._changed:
            abandoned = self._scheduler.drain()
        for request in abandoned:
            if request.begin():
                self._observer.rejected("draining")
                request.fail(DrainingError("the evaluator shut down before this was run"))
        self._evaluations.join()
        self._thread.join(timeout_seconds)

    def _predict_refusal(self, examples: int, size: int, deadline: float | None, caller: CallerKey) -> Refusal | None:
        return self._admission.predict(examples, size, deadline, caller=caller, queue=self._scheduler.predicts)

    def _may_clear(self, refusal: Refusal) -> bool:
        """Whether there may be room without the cancelled and expired requests."""
        return isinstance(refusal.error, OverloadedError) and self._may_sweep()

    def _sweep(self) -> Sequence[QueuedPredict]:
        """Remove and return the cancelled and expired requests."""
        self._swept_at = time.monotonic()
        return self._scheduler.predicts.remove(is_dead)

    def _may_sweep(self) -> bool:
        """Whether the last sweep is long enough ago: sweeps are slow, and every refusal might start one."""
        return time.monotonic() - self._swept_at >= _SECONDS_BETWEEN_SWEEPS

    def _may_run_here(self) -> bool:
        """Whether only Predict requests are queued and they are not delayed for more."""
        held_back = self._settings.max_batch_delay_seconds > 0
        return self._settings.inline_batches and not held_back and not self._scheduler.evaluates

    def _start_extra_threads(self) -> None:
        """Start the threads for the batches that run beside the first one."""
        wanted = 1 if self._settings.overlap_batches else self._settings.concurrent_batches
        while len(self._extra_threads) < wanted - 1 and not self._closing:
            position = len(self._extra_threads)
            other = DeviceThread(
                wait=functools.partial(self._wait_for_extra_work, position),
                next_job=self._next_extra_job,
                name=f"understudy-device-{position + 2}",
            )
            self._extra_threads.append(other)
            other.start()

    def _wake(self) -> None:
        """Wake a thread that may take what is queued: the first one if it is idle."""
        if self._thread.is_busy:
            self._extra_work.notify()
        else:
            self._changed.notify()

    def _wait_for_extra_work(self, position: int, _patient: bool) -> float | None:  # noqa: FBT001 - as DeviceThread calls it
        """Wait until requests are queued while the first thread is busy; return None after shutdown."""
        with self._changed:
            while not (
                self._scheduler.predicts
                and self._thread.is_busy
                and position < self._settings.concurrent_batches - 1
                and not self._settings.max_batch_delay_seconds
                and not (self._first_is_brief and self._is_brief(self._scheduler.next_predicts()))
            ):
                if self._closing:
                    return None
                self._extra_work.wait()
            return 0.0

    def _next_extra_job(self, _fill_seconds: float) -> Job:
        with self._changed:
            return self._predicting(self._take_share(self._scheduler.extra_predict_batch))

    def _take_share(self, take: Callable[[int], list[QueuedPredict]]) -> list[QueuedPredict]:
        """Dequeue the share of one of the idle threads, the caller's, and wake the next one for the rest."""
        others = self._extra_threads[: self._settings.concurrent_batches - 1]
        idle = sum(not thread.is_busy for thread in (self._thread, *others))
        whole = self._scheduler.next_predicts()
        share = math.ceil(self._scheduler.predicts.examples / (idle + 1))
        if not idle or self._is_brief(whole) or (whole and self._judge.is_brief(whole[0].group, share)):
            return take(self._settings.max_batch_size)
        batch = take(share)
        if self._scheduler.predicts:
            self._extra_work.notify()
        return batch

    def _is_brief(self, batch: Sequence[QueuedPredict]) -> bool:
        """Whether a batch takes less time than a handover to another thread is worth; False while unknown."""
        return bool(batch) and self._judge.is_brief(batch[0].group, sum(request.examples for request in batch))

    def _may_overlap(self) -> bool:
        """Whether a Predict batch is next, so that it can overlap the current batch."""
        return bool(self._scheduler.predicts) and not self._scheduler.is_evaluate_next()

    def _wait(self, patient: bool) -> float | None:  # noqa: FBT001 - as DeviceThread calls it
        """Wait for work, then for more to fill the batch; return the seconds of the latter, or None after shutdown.

        If not ``patient``, also return None unless there is a batch that may overlap another.
        """
        with self._changed:
            if not patient and not self._may_overlap():
                return None
            expected = self._last_requests + self._scheduler.predicts.requests
            while not self._scheduler:
                if self._closing:
                    return None
                self._changed.wait()
            began = time.monotonic()
            if not self._scheduler.is_evaluate_next():
                self._wait_for_more(self._scheduler.predicts.oldest())
                self._gather(expected)
            return time.monotonic() - began

    def _next_job(self, fill_seconds: float) -> Job:
        """Dequeue the next work."""
        with self._changed:
            self._first_is_brief = False
            if self._scheduler.is_evaluate_next():
                self._evaluations.notify_room()
                return functools.partial(self._runner.evaluate, self._scheduler.next_evaluate())
            batch = self._take_share(self._scheduler.next_predict_batch)
            self._first_is_brief = self._is_brief(batch)
            self._last_requests = len(batch)
            return self._predicting(batch, fill_seconds)

    def _take_brief_predicts(self) -> Job | None:
        with self._changed:
            batch = self._scheduler.next_predicts()
            if not self._is_brief(batch):
                return None
            self._scheduler.predicts.take(batch)
            return self._predicting(batch, inline=True)

    def _extra_predict_job(self) -> Job:
        with self._changed:
            return self._predicting(self._scheduler.extra_predict_batch())

    def _predicting(self, batch: Sequence[QueuedPredict], fill_seconds: float = 0.0, *, inline: bool = False) -> Job:
        self._observer.queue_changed(self._scheduler.predicts.examples)
        if self._settings.overlap_batches and not self._settings.max_batch_delay_seconds:
            return functools.partial(self._runner.launch, batch, fill_seconds)
        return functools.partial(self._runner.predict, batch, fill_seconds, inline=inline)

    def _wait_for_more(self, oldest: QueuedPredict) -> None:
        """Delay the oldest request until its batch is full or it has waited long enough."""
        until = oldest.arrived + self._settings.max_batch_delay_seconds
        while not self._closing and (left := until - time.monotonic()) > 0:
            if self._scheduler.predicts.examples_like(oldest) >= self._settings.max_batch_size:
                return
            self._changed.wait(left)

    def _gather(self, expected: int) -> None:
        """Wait a moment until as many requests are queued as are likely to come; not while an evaluation waits."""
        until = time.monotonic() + self._settings.gathering_seconds
        queue = self._scheduler.predicts
        while (
            queue.requests < expected
            and queue.examples < self._settings.max_batch_size
            and not self._scheduler.evaluates
            and not self._closing
            and (left := until - time.monotonic()) > 0
        ):
            self._changed.wait(left)
