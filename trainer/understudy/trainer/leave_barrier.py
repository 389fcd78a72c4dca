"""The end of a synchronous cluster: a task exits only after all have done the last step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import tensorflow as tf

from understudy.checkpoints import RunDir, read_training_status
from understudy.checkpoints.checkpoint_errors import UnsupportedFormatError
from understudy.checkpoints.training import TrainingState

FINISH_SECONDS = 10.0
"""How long a task waits for the chief to record that training has finished, after all have done the last step."""

_POLL_SECONDS = 0.05
_log = logging.getLogger(__name__)


def wait_to_leave(
    wait_for_all: Callable[[], None],
    run_dir: RunDir,
    *,
    is_chief: bool,
    timeout_seconds: float = FINISH_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every task has done its last step.

    One task may pass the barrier a little before another. If it exits at once, the other takes the early exit for a
    crash. So each task waits until the chief has recorded the end in its journal, which also tells a task whose
    barrier failed that training succeeded.

    Args:
        wait_for_all: The cluster's barrier.
        run_dir: Where the chief writes its journal.
        is_chief: Whether this task is the chief.
        timeout_seconds: How long to wait for the chief's record.
        clock: Seconds from any origin, never going back.
        sleep: Waits.

    Raises:
        tf.errors.OpError: A task died before its last step was done.
    """
    try:
        wait_for_all()
    except tf.errors.OpError:
        if is_chief or not _finishes(run_dir, clock() + timeout_seconds, clock, sleep):
            raise
    else:
        if not is_chief:
            _finishes(run_dir, clock() + timeout_seconds, clock, sleep)


def _finishes(run_dir: RunDir, until: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
    """Return whether the chief records in time that training has finished rather than failed."""
    while (state := _state(run_dir)) == "running" and clock() < until:
        sleep(_POLL_SECONDS)
    return state == "finished"


def _state(run_dir: RunDir) -> TrainingState:
    try:
        status = read_training_status(run_dir, now=time.time())
    except (OSError, UnsupportedFormatError) as error:
        _log.warning("the chief's journal could not be read: %s", error)
        return "running"
    return "running" if status is None else status.state
