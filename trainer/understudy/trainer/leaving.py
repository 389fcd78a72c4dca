"""Waits at the end of a training: for all tasks of the cluster, and until the last checkpoint is evaluated."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from understudy.checkpoints import RunDir, read_training_status
from understudy.checkpoints.checkpoint_errors import UnsupportedFormatError
from understudy.checkpoints.evaluation_results import EvaluationResults, StepResult
from understudy.checkpoints.training import TrainingState
from understudy.trainer.trainer_errors import EvaluationTimeoutError

FINISH_SECONDS = 10.0
"""How long a task waits for the chief to record that training has finished, after all have done the last step."""

_POLL_SECONDS = 0.05
_RESULT_POLL_SECONDS = 0.5

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


def wait_to_end_early(wait_for_all: Callable[[], None], *, is_saved: Callable[[], bool]) -> None:
    """Wait until every task knows that all end now, because one was asked to.

    One task may pass the barrier a little before another and exit. The other must not take that for a crash, unless
    what there was to save is not saved.

    Args:
        wait_for_all: The cluster's barrier.
        is_saved: Returns whether everything is saved. Called if the barrier fails.

    Raises:
        tf.errors.OpError: A task died before all was saved.
    """
    try:
        wait_for_all()
    except tf.errors.OpError:
        if not is_saved():
            raise


def _finishes(run_dir: RunDir, until: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
    """Return whether the chief records in time that training has finished rather than failed."""
    while (state := _state(run_dir)) == "running" and clock() < until:
        sleep(_POLL_SECONDS)
    return state == "finished"


def _state(run_dir: RunDir) -> TrainingState:
    try:
        status = read_training_status(run_dir, now=0.0, stale_after_seconds=math.inf)  # whatever the chief's clock says
    except (OSError, UnsupportedFormatError) as error:
        _log.warning("the chief's journal could not be read: %s", error)
        return "running"
    return "running" if status is None else status.state


def wait_for_evaluation(
    state_dir: Path,
    *,
    step: int,
    digest: str,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> StepResult:
    """Return the result of a checkpoint once it is settled: scored on every dataset, or failed with a reason.

    Args:
        state_dir: The evaluator's state folder, which need not exist yet.
        step: The step of the checkpoint.
        digest: Identifies the model, so that a result of an earlier training does not count.
        timeout_seconds: How long to wait.
        clock: Seconds from any origin, never going back.
        sleep: Waits.

    Raises:
        EvaluationTimeoutError: It was not settled in time.
        UnsupportedFormatError: The result has another version.
    """
    results = EvaluationResults(state_dir)
    give_up_at = clock() + timeout_seconds
    while True:
        result = _read(results, step)
        if result is not None and result.settled and digest in result.digests:
            return result
        if clock() >= give_up_at:
            raise EvaluationTimeoutError(
                f"training is done, but step {step} was not evaluated within {timeout_seconds:g} s; results are "
                f"expected in {state_dir}, the evaluator's state folder"
            )
        sleep(_RESULT_POLL_SECONDS)


def _read(results: EvaluationResults, step: int) -> StepResult | None:
    try:
        return results.of(step)
    except OSError as error:
        _log.warning("the evaluator's result of step %d could not be read: %s", step, error)
        return None
