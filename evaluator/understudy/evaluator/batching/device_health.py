"""Tells failing devices from the errors of callers' data."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable

import tensorflow as tf

from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import END_AFTER, DeviceListener, DeviceState

_log = logging.getLogger(__name__)

_DEVICE_ERRORS = (tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError)
"""The errors of TensorFlow's runtime for a failing device. Errors of a caller's data have other classes."""

_FIRST_OF_SEVERAL = re.compile(r"^\s*\(0\) [A-Z_]+:\s*(\S.*)$", re.MULTILINE)
"""Matches the first replica's message in the text of an error of several replicas."""


class DeviceHealth:
    """Counts consecutive runs that fail because of a device. Thread-safe; the listener must not run batches.

    Args:
        limit: The number of consecutive failures for ``FAILING``; twice as many give ``FAILED``, which is final.
        listener: Called when the state changes.

    Attributes:
        failures: The number of consecutive failures so far.
    """

    def __init__(self, limit: int, listener: DeviceListener) -> None:
        self._limit = limit
        self._listener = listener
        self._lock = threading.Lock()
        self.failures = 0
        self._state = DeviceState.WORKING

    def answered(self) -> None:
        """Record a successful run. Needed only if there are `failures`."""
        with self._lock:
            self.failures = 0
            if self._state is DeviceState.FAILING:
                self._set_state(DeviceState.WORKING, "")

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
        self.failures += 1
        text = f"{type(error).__name__}: {_reason(error)}"
        _log.error("a device failed, %d times in a row: %s", self.failures, text)
        if self._state is DeviceState.WORKING and self.failures >= self._limit:
            self._set_state(DeviceState.FAILING, text)
        if self._state is DeviceState.FAILING and self.failures >= END_AFTER * self._limit:
            self._set_state(DeviceState.FAILED, text)

    def _set_state(self, state: DeviceState, text: str) -> None:
        self._state = state
        self._listener(state, text)


def _reason(error: Exception) -> str:
    several = _FIRST_OF_SEVERAL.search(str(error))
    return several[1] if several else first_line(error)
