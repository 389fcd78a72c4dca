"""Waits at the end of a training until the evaluator has settled the last checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from understudy.checkpoints.evaluation_results import EvaluationResults, StepResult
from understudy.trainer.trainer_errors import EvaluationTimeoutError

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


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
        sleep(_POLL_SECONDS)


def _read(results: EvaluationResults, step: int) -> StepResult | None:
    try:
        return results.of(step)
    except OSError as error:
        _log.warning("the evaluator's result of step %d could not be read: %s", step, error)
        return None
