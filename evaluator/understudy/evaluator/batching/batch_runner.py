"""Runs batches of dequeued requests, delivers the outcomes, and tells failing devices."""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from understudy.evaluator.batching.device_thread import InlineJudge, Stopwatch
from understudy.evaluator.batching.request_queue import (
    BorrowedHandle,
    EvaluateRequest,
    LatencyEstimator,
    PredictRequest,
    Request,
    is_late,
    late,
)
from understudy.evaluator.evaluator_errors import InvalidInputError, blame_machine, first_line
from understudy.evaluator.observer import Observer
from understudy.evaluator.types import (
    END_AFTER,
    Array,
    Arrays,
    DeviceListener,
    DeviceState,
    Outcome,
    Prediction,
    ResultSink,
)

_log = logging.getLogger(__name__)

_DEVICE_ERRORS = (tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError)
"""The errors of TensorFlow's runtime for a failing device. Errors of a caller's data have other classes."""

_FIRST_OF_SEVERAL = re.compile(r"^\s*\(0\) [A-Z_]+:\s*(\S.*)$", re.MULTILINE)
"""Matches the first replica's message in the text of an error of several replicas."""


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

    def begin(self, request: Request) -> bool:
        """Mark a request as running; drop it and return False if it was cancelled or its deadline has passed."""
        if not request.begin():
            self._observer.rejected("cancelled")
            return False
        if is_late(request):
            self._observer.rejected("deadline")
            request.fail(late(request))
            return False
        return True

    def predict(self, requests: Sequence[PredictRequest], fill_seconds: float, *, inline: bool = False) -> None:
        """Borrow a handle, run the requests as one batch, and deliver the outcomes.

        Args:
            requests: The batch.
            fill_seconds: How long the batch was delayed for more requests.
            inline: Whether it runs on the thread that dispatched it.
        """
        batch = [request for request in requests if self.begin(request)]
        watch = Stopwatch()
        handle = self._borrow(batch)
        if handle is None:
            return
        outcomes = _Outcomes()
        try:
            self._compute(handle, batch, fill_seconds, outcomes)
        finally:
            handle.release()
            outcomes.deliver()
            examples, cost = sum(request.examples for request in batch), watch.cost()
            self._latency.observe(examples, cost.wall_seconds)
            self._judge.observe(batch[0].group, examples, cost, inline=inline)

    def launch(self, requests: Sequence[PredictRequest], fill_seconds: float) -> Callable[[], None] | None:
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
            fetch = functools.partial(_raise, error)
        return functools.partial(self._finish, handle, batch, fill_seconds, began, fetch)

    def _finish(
        self,
        handle: BorrowedHandle,
        batch: Sequence[PredictRequest],
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

    def _borrow(self, batch: Sequence[PredictRequest]) -> BorrowedHandle | None:
        """Borrow a handle for a batch; if that fails, deliver the error to all requests and return None."""
        if not batch:
            return None
        try:
            return batch[0].borrow()
        except Exception as error:  # noqa: BLE001 - it is the outcome of all requests
            outcomes = _Outcomes()
            for request in batch:
                outcomes.add(request, error)
            outcomes.deliver()
            return None

    def _compute(
        self, handle: BorrowedHandle, batch: Sequence[PredictRequest], fill_seconds: float, outcomes: _Outcomes
    ) -> None:
        began = time.monotonic()
        self._answer(
            handle, batch, fill_seconds, outcomes, began=began, fetch=lambda: handle.slot.forward(_merge(batch))
        )

    def _answer(
        self,
        handle: BorrowedHandle,
        batch: Sequence[PredictRequest],
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
        self, handle: BorrowedHandle, batch: Sequence[PredictRequest], error: Exception, outcomes: _Outcomes
    ) -> None:
        """Run the requests of a failed batch one by one, so that one caller's values cannot fail another's request."""
        if len(batch) == 1:
            outcomes.add(batch[0], blame_machine(error))
            self._observer.request_failed(step=handle.step, seconds=time.monotonic() - batch[0].arrived)
            return
        for request in batch:
            self._compute(handle, [request], 0.0, outcomes)

    def evaluate(self, request: EvaluateRequest) -> None:
        """Run the work of an evaluation."""
        if not self.begin(request):
            return
        began = time.monotonic()
        try:
            result = request.work()
        except Exception as error:  # noqa: BLE001 - it is recorded in the future
            blamed = blame_machine(error)
            self._health.raised(blamed, request.trial)
            request.future.set_exception(blamed)
            return
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


class DeviceHealth:
    """Counts consecutive runs that fail because of a device. Thread-safe; the listener must not run batches.

    Args:
        limit: The number of consecutive failures for ``FAILING``; twice as many give ``FAILED``, which is final.
        listener: Called when the state changes.
    """

    def __init__(self, limit: int, listener: DeviceListener) -> None:
        self._limit = limit
        self._listener = listener
        self._lock = threading.Lock()
        self._failures = 0
        self._state = DeviceState.WORKING

    def answered(self) -> None:
        """Record a successful run."""
        if self._failures:
            with self._lock:
                self._failures = 0
                if self._state is DeviceState.FAILING:
                    self._become(DeviceState.WORKING, "")

    def raised(self, error: Exception, trial: Callable[[], object] | None) -> None:
        """Record the error of a run. An error of the caller's data shows that the devices work.

        Args:
            error: The error.
            trial: Runs the same model on generated data, where the run was on a caller's. A caller's values can make a
                model's own code raise the error of a failing device; such an error counts only if the trial fails, too.
        """
        if isinstance(error, _DEVICE_ERRORS) and trial is not None:
            try:
                trial()
            except Exception as failure:  # noqa: BLE001 - its class decides
                error = failure
            else:
                self.answered()
                return
        if isinstance(error, _DEVICE_ERRORS):
            with self._lock:
                self._count(error)
        elif isinstance(error, tf.errors.OpError | InvalidInputError):
            self.answered()

    def _count(self, error: Exception) -> None:
        self._failures += 1
        text = f"{type(error).__name__}: {_reason(error)}"
        _log.error("a device failed, %d times in a row: %s", self._failures, text)
        if self._state is DeviceState.WORKING and self._failures >= self._limit:
            self._become(DeviceState.FAILING, text)
        if self._state is DeviceState.FAILING and self._failures >= END_AFTER * self._limit:
            self._become(DeviceState.FAILED, text)

    def _become(self, state: DeviceState, text: str) -> None:
        self._state = state
        self._listener(state, text)


class _Outcomes:
    """The outcomes of the requests of one batch, delivered to each sink in one call."""

    def __init__(self) -> None:
        self._sinks: dict[ResultSink[Any], list[tuple[Any, Outcome]]] = {}

    def add(self, request: PredictRequest, outcome: Outcome) -> None:
        self._sinks.setdefault(request.sink, []).append((request.token, outcome))

    def deliver(self) -> None:
        for sink, outcomes in self._sinks.items():
            sink.deliver(outcomes)


def _raise(error: Exception) -> NoReturn:
    raise error


def _merge(batch: Sequence[PredictRequest]) -> Arrays:
    if len(batch) == 1:
        return batch[0].inputs
    return {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}


def _reason(error: Exception) -> str:
    several = _FIRST_OF_SEVERAL.search(str(error))
    return several[1] if several else first_line(error)
