"""The thread that calls the devices, and their health."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import tensorflow as tf

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.library_errors import first_line
from understudy.evaluator.observer import END_AFTER, DeviceListener, DeviceState

_log = logging.getLogger(__name__)

_DEVICE_ERRORS = (tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError)
"""The errors of TensorFlow's runtime for a failing device. Errors of a caller's data have other classes."""

_FIRST_OF_SEVERAL = re.compile(r"^\s*\(0\) [A-Z_]+:\s*(\S.*)$", re.MULTILINE)
"""Matches the first replica's message in the text of an error of several replicas."""


_Turn = TypeVar("_Turn")

Job = Callable[[], Callable[[], None] | None]
"""Does its work, or launches it and returns a function that completes it once the device is done."""


class DeviceThread(Generic[_Turn]):
    """A thread that runs one job after another; while it is idle, another thread may run one. Thread-safe.

    Args:
        wait: Called on the thread, with whether to wait for work; returns a turn, or None after shutdown, or None if
            the launched job must be completed first.
        next_job: Called when the device is free; returns the job of a turn.
    """

    def __init__(self, *, wait: Callable[[bool], _Turn | None], next_job: Callable[[_Turn], Job]) -> None:
        self._wait = wait
        self._next_job = next_job
        self._device = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="understudy-device", daemon=True)

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
        while (turn := self._wait(launched is None)) is not None or launched is not None:
            with self._device:
                following = None if turn is None else _begin(self._next_job(turn))
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


class DeviceHealth:
    """Counts consecutive runs that fail because of a device. For one thread at a time.

    Args:
        limit: The number of consecutive failures for ``FAILING``; twice as many give ``FAILED``, which is final.
        listener: Called when the state changes.
    """

    def __init__(self, limit: int, listener: DeviceListener) -> None:
        self._limit = limit
        self._listener = listener
        self._failures = 0
        self._state = DeviceState.WORKING

    def answered(self) -> None:
        """Record a successful run."""
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


def _reason(error: Exception) -> str:
    several = _FIRST_OF_SEVERAL.search(str(error))
    return several[1] if several else first_line(error)
