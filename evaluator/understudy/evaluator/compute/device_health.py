"""Whether the devices still compute."""

from __future__ import annotations

import logging
import re

import tensorflow as tf

from understudy.evaluator.compute.text import first_line
from understudy.evaluator.device_state import END_AFTER, DeviceListener, DeviceState
from understudy.evaluator.evaluator_errors import InvalidInputError

_log = logging.getLogger(__name__)

_DEVICE_ERRORS = (tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError)
"""What TensorFlow's runtime raises for a device that does not answer. Faults of a caller's data have other classes."""

_FIRST_OF_SEVERAL = re.compile(r"^\s*\(0\) [A-Z_]+:\s*(\S.*)$", re.MULTILINE)
"""In the text of an error that several replicas have: what the first of them says."""


class DeviceHealth:
    """Counts the runs that fail in a row by the devices' fault. For one thread at a time.

    Args:
        limit: As many failures in a row make the devices ``FAILING``, twice as many ``FAILED``, which is final.
        listener: Called when the state changes.
    """

    def __init__(self, limit: int, listener: DeviceListener) -> None:
        self._limit = limit
        self._listener = listener
        self._failures = 0
        self._state = DeviceState.WORKING

    def answered(self) -> None:
        """Note that the devices computed something."""
        self._failures = 0
        if self._state is DeviceState.FAILING:
            self._become(DeviceState.WORKING, "")

    def raised(self, error: Exception) -> None:
        """Note what a run ended with. An error of the caller's data shows that the devices answer."""
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
