"""Runs batches of dequeued requests on the threads of the devices, or the brief ones on that of the event loop."""

from __future__ import annotations

import functools
import logging
import resource
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from understudy.evaluator.batching.device_health import DeviceHealth
from understudy.evaluator.batching.request_queue import (
    BorrowedHandle,
    LatencyEstimator,
    QueuedEvaluate,
    QueuedPredict,
    QueuedRequest,
    is_late,
    late,
)
from understudy.evaluator.evaluator_errors import blame_machine, without_frames
from understudy.evaluator.observer import Observer
from understudy.evaluator.types import Array, Arrays, Outcome, Prediction, ResultSink

_log = logging.getLogger(__name__)

Job = Callable[[], Callable[[], None] | None]
"""Does its work, or launches it and returns a function that completes it once the device is done."""

BRIEF_SECONDS = 1e-3
"""A handover to another thread and back takes some tenths of this, and more on a busy machine."""

LONGEST_SECONDS = 2e-3
"""The maximum time that an inline batch may block the event loop."""

_TRIAL_BATCHES = 8
_REMEMBERED_BATCHES = 32
_FORGIVEN_BATCHES = 1
_FIRST_BAN_BATCHES = 64
_LONGEST_BAN_BATCHES = 2**20
_REMEMBERED_SHAPES = 256


class DeviceThread:
    """A thread that runs one job after another; while it is idle, another thread may run one. Thread-safe.

    Args:
        wait: Called on the thread, with whether to wait for work; returns how many seconds it waited to fill the batch,
            or None after shutdown, or None if the launched job must be completed first.
        next_job: Called with these seconds when the device is free; returns the job.
        name: The name of the thread.
    """

    def __init__(
        self,
        *,
        wait: Callable[[bool], float | None],
        next_job: Callable[[float], Job],
        name: str = "understudy-device",
    ) -> None:
        self._wait = wait
        self._next_job = next_job
        self._device = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether a job is being taken or run."""
        return self._device.locked()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def do_here(self, next_job: Callable[[], Job | None]) -> None:
        """Run the next job, if any, on the calling thread if the device is free."""
        if not self._device.acquire(blocking=False):
            return
        try:
            job = next_job()
            if job is not None:
                do(job)
        finally:
            self._device.release()

    def join(self, timeout_seconds: float) -> None:
        """Wait until the thread has ended, or until the timeout."""
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        launched: Callable[[], None] | None = None
        while (fill_seconds := self._wait(launched is None)) is not None or launched is not None:
            with self._device:
                following = None if fill_seconds is None else _begin(self._next_job(fill_seconds))
                if launched is not None:
                    _begin(launched)
                launched = following


def do(job: Job) -> None:
    """Run a job, and wait for the device if it was launched. Errors are logged."""
    launched = _begin(job)
    if launched is not None:
        _begin(launched)


def _begin(job: Job) -> Callable[[], None] | None:
    try:
        return job()
    except Exception:  # noqa: BLE001 - the thread serves all requests and must survive a faulty observer
        _log.exception("an observer or a callback failed on the device's thread")
        return None


class InlineJudge:
    """Decides by the duration of recent batches of the same shape. Thread-safe.

    A shape is a group of requests (version, dtypes and all dimensions except the first) and the number of examples,
    rounded up to a power of two. Its first batches run on the device's thread, which has to wait for the GIL; therefore
    their lower quartile must be brief. Then the event loop's own batches count, by a high quantile: if a second one of
    the last 32 takes more than `LONGEST_SECONDS`, or half of them are not brief, the shape returns to the device's
    thread, each time for twice as many batches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shapes: OrderedDict[tuple[Hashable, int], _Shape] = OrderedDict()

    def is_brief(self, group: Hashable, examples: int) -> bool:
        """Return whether a batch is brief enough to run inline; False while unknown."""
        with self._lock:
            shape = self._shapes.get(_key(group, examples))
            return shape is not None and shape.is_brief()

    def observe(self, group: Hashable, examples: int, seconds: float, *, inline: bool) -> None:
        """Add what a batch took, including all work of its thread; see `Stopwatch.own_seconds`."""
        key = _key(group, examples)
        with self._lock:
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = _Shape()
                if len(self._shapes) > _REMEMBERED_SHAPES:
                    self._shapes.popitem(last=False)
            self._shapes.move_to_end(key)
            if inline:
                shape.ran_inline(seconds)
            else:
                shape.ran_on_device_thread(seconds)


class Stopwatch:
    """Measures a batch on the thread that made this object."""

    def __init__(self) -> None:
        self._waits = _waits_of_thread()
        self._cpu = time.thread_time()
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Return the elapsed time."""
        return time.monotonic() - self._began

    def own_seconds(self, elapsed: float) -> float:
        """Return what the batch itself took of the elapsed time: what other threads and processes would not change.

        A thread that waited for nothing was computing, or its core was given to others: its CPU time counts. One that
        waited may have done so for TensorFlow's other threads: the elapsed time counts.
        """
        if elapsed <= BRIEF_SECONDS or self._waits is None or _waits_of_thread() != self._waits:
            return elapsed
        return min(elapsed, time.thread_time() - self._cpu)


def _waits_of_thread() -> int | None:
    """Return how often this thread has given its core up to wait; None where the system does not count that."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if sys.platform == "linux" else None


@dataclass(kw_only=True)
class _Shape:
    """The recent batches of one shape."""

    trial: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _TRIAL_BATCHES))
    inline: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_BATCHES))
    banned_batches: int = 0
    next_ban: int = _FIRST_BAN_BATCHES

    def is_brief(self) -> bool:
        if self.inline:
            return True
        if self.banned_batches or len(self.trial) < _TRIAL_BATCHES:
            return False
        return sorted(self.trial)[len(self.trial) // 4] < BRIEF_SECONDS

    def ran_on_device_thread(self, seconds: float) -> None:
        self.trial.append(seconds)
        self.banned_batches = max(0, self.banned_batches - 1)

    def ran_inline(self, seconds: float) -> None:
        self.inline.append(seconds)
        if seconds > BRIEF_SECONDS and self._is_too_long():
            self.banned_batches, self.next_ban = self.next_ban, min(2 * self.next_ban, _LONGEST_BAN_BATCHES)
            self.inline.clear()
            self.trial.clear()

    def _is_too_long(self) -> bool:
        """Whether half of the batches are not brief, or too many take more than `LONGEST_SECONDS`."""
        not_brief = sum(seconds > BRIEF_SECONDS for seconds in self.inline)
        too_long = sum(seconds > LONGEST_SECONDS for seconds in self.inline)
        return too_long > _FORGIVEN_BATCHES or 2 * not_brief > max(len(self.inline), _TRIAL_BATCHES)


def _key(group: Hashable, examples: int) -> tuple[Hashable, int]:
    return group, (examples - 1).bit_length()


class BatchRunner:
    """Computes batches and delivers the outcomes of their requests, errors included. Thread-safe but for `launch`.

    Args:
        observer: Notified of each computed batch, and of dropped requests.
        latency: Receives the duration of Predict batches.
        judge: Receives the cost of Predict batches.
        health: Counts the runs that fail because of a device.
    """

    def __init__(self, observer: Observer, latency: LatencyEstimator, judge: InlineJudge, health: DeviceHealth) -> None:
        self._observer = observer
        self._latency = latency
        self._judge = judge
        self._health = health
        self._finished_at = 0.0
        self._reporting = threading.Lock()

    def begin(self, request: QueuedRequest) -> bool:
        """Mark a request as running; drop it and return False if it was cancelled or its deadline has passed."""
        if not request.begin():
            self._observer.rejected("cancelled")
            return False
        if is_late(request):
            self._observer.rejected("deadline")
            request.fail(late(request))
            return False
        return True

    def predict(self, requests: Sequence[QueuedPredict], fill_seconds: float, *, inline: bool = False) -> None:
        """Borrow a handle, run the requests as one batch, and deliver the outcomes.

        Args:
            requests: The batch.
            fill_seconds: How long the batch was delayed for more requests.
            inline: Whether it runs on the thread that dispatched it.
        """
        batch = [request for request in requests if self.begin(request)]
        stopwatch = Stopwatch()
        handle = self._borrow(batch)
        if handle is None:
            return
        outcomes = _Outcomes()
        try:
            self._compute(handle, batch, fill_seconds, outcomes)
        finally:
            handle.release()
            outcomes.deliver()
            seconds = stopwatch.seconds()
            examples = sum(request.examples for request in batch)
            self._latency.observe(examples, seconds)
            self._judge.observe(batch[0].group, examples, stopwatch.own_seconds(seconds), inline=inline)

    def launch(self, requests: Sequence[QueuedPredict], fill_seconds: float) -> Callable[[], None] | None:
        """Borrow a handle and launch the requests as one batch.

        Returns:
            A function that fetches the outputs and delivers the outcomes; None if there is nothing to fetch.
        """
        batch = [request for request in requests if self.begin(request)]
        began = time.monotonic()
        handle = self._borrow(batch)
        if handle is None:
            return None
        try:
            fetch = handle.slot.launch(_merge(batch))
        except Exception as error:  # noqa: BLE001 - it is recorded as the outcome
            fetch = functools.partial(_raise, without_frames(error))
        return functools.partial(self._finish, handle, batch, fill_seconds, began, fetch)

    def _finish(
        self,
        handle: BorrowedHandle,
        batch: Sequence[QueuedPredict],
        fill_seconds: float,
        began: float,
        fetch: Callable[[], dict[str, Array]],
    ) -> None:
        """Wait for the outputs of a launched batch. Its duration counts from the end of the previous batch."""
        outcomes = _Outcomes()
        try:
            self._answer(handle, batch, fill_seconds, outcomes, began=began, fetch=fetch)
        finally:
            handle.release()
            outcomes.deliver()
            done = time.monotonic()
            self._latency.observe(sum(request.examples for request in batch), done - max(began, self._finished_at))
            self._finished_at = done

    def _borrow(self, batch: Sequence[QueuedPredict]) -> BorrowedHandle | None:
        """Borrow a handle for a batch; if that fails, deliver the error to all requests and return None."""
        if not batch:
            return None
        try:
            return batch[0].borrow()
        except Exception as error:  # noqa: BLE001 - it is the outcome of all requests
            outcomes, outcome = _Outcomes(), without_frames(error)
            for request in batch:
                outcomes.add(request, outcome)
            outcomes.deliver()
            return None

    def _compute(
        self, handle: BorrowedHandle, batch: Sequence[QueuedPredict], fill_seconds: float, outcomes: _Outcomes
    ) -> None:
        began = time.monotonic()
        self._answer(
            handle, batch, fill_seconds, outcomes, began=began, fetch=lambda: handle.slot.forward(_merge(batch))
        )

    def _answer(
        self,
        handle: BorrowedHandle,
        batch: Sequence[QueuedPredict],
        fill_seconds: float,
        outcomes: _Outcomes,
        *,
        began: float,
        fetch: Callable[[], dict[str, Array]],
    ) -> None:
        try:
            outputs = fetch()
        except Exception as error:  # noqa: BLE001 - it is recorded as the outcome
            self._health.raised(error, handle.slot.try_out)
            self._fail(handle, batch, error, outcomes)
            return
        compute_seconds = time.monotonic() - began
        if self._health.failures:
            self._health.answered()
        start = 0
        for request in batch:
            stop = start + request.examples
            examples = {name: array[start:stop] for name, array in outputs.items()}
            outcomes.add(request, Prediction(outputs=examples, step=handle.step))
            start = stop
        with self._reporting:
            self._observer.batch_computed(
                "predict",
                examples=start,
                queue_seconds=[began - request.arrived for request in batch],
                fill_seconds=fill_seconds,
                compute_seconds=compute_seconds,
                step=handle.step,
                tokens=[request.token for request in batch],
            )

    def _fail(
        self, handle: BorrowedHandle, batch: Sequence[QueuedPredict], error: Exception, outcomes: _Outcomes
    ) -> None:
        """Run the requests of a failed batch one by one, so that one caller's values cannot fail another's request."""
        if len(batch) == 1:
            outcomes.add(batch[0], without_frames(blame_machine(error)))
            self._observer.request_failed(step=handle.step, seconds=time.monotonic() - batch[0].arrived)
            return
        for request in batch:
            self._compute(handle, [request], 0.0, outcomes)

    def evaluate(self, request: QueuedEvaluate) -> None:
        """Run the work of an evaluation."""
        if not self.begin(request):
            return
        began = time.monotonic()
        try:
            result = request.work()
        except Exception as error:  # noqa: BLE001 - it is recorded in the future
            blamed = without_frames(blame_machine(error))
            self._health.raised(blamed, request.trial)
            request.future.set_exception(blamed)
            return
        if self._health.failures:
            self._health.answered()
        with self._reporting:
            self._observer.batch_computed(
                "evaluate",
                examples=request.examples,
                queue_seconds=[began - request.arrived],
                fill_seconds=0.0,
                compute_seconds=time.monotonic() - began,
            )
        request.future.set_result(result)


class _Outcomes:
    """The outcomes of the requests of one batch, delivered to each sink in one call."""

    def __init__(self) -> None:
        self._sinks: dict[ResultSink[Any], list[tuple[Any, Outcome]]] = {}

    def add(self, request: QueuedPredict, outcome: Outcome) -> None:
        self._sinks.setdefault(request.sink, []).append((request.token, outcome))

    def deliver(self) -> None:
        for sink, outcomes in self._sinks.items():
            sink.deliver(outcomes)


def _raise(error: Exception) -> NoReturn:
    raise error


def _merge(batch: Sequence[QueuedPredict]) -> Arrays:
    if len(batch) == 1:
        return batch[0].inputs
    return {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}
