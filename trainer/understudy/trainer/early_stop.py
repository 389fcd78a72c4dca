"""Stops all tasks of a training at the same step when the evaluator's scores no longer improve."""

from __future__ import annotations

from understudy.trainer.job import Job
from understudy.trainer.progress import ProgressReporter
from understudy.trainer.settings import TrainSettings
from understudy.trainer.stopping import ResultsWatch, parse_stop_rule


class EarlyStop:
    """Decides at a checkpoint whether it is the last. Only the chief reads the results; the others get its answer.

    In a cluster, each training task has one, made from the same settings, and calls it at the same steps.

    Args:
        job: The training.
        settings: Hold the stop rule, if any.
        reporter: Receives the reason.
        is_chief: Whether this task is the chief.
    """

    def __init__(self, job: Job, settings: TrainSettings, reporter: ProgressReporter, *, is_chief: bool) -> None:
        self._job = job
        self._reporter = reporter
        self._is_asked = settings.stop_when is not None
        self._watch: ResultsWatch | None = None
        if settings.stop_when is not None and is_chief:
            rule = parse_stop_rule(settings.stop_when, settings.stop_mode)
            self._watch = ResultsWatch(rule, settings.evaluator_state_dir)

    def is_due(self, step: int) -> bool:
        """Return whether to stop at this step, the same in every task.

        Raises:
            StopRuleError: The evaluator does not score what the rule names; raised by the chief.
        """
        if not self._is_asked:
            return False
        reason = None if self._watch is None else self._watch.reason_to_stop(step)
        if reason is not None:
            self._reporter.stopped(step, reason)
        return self._job.any_task(reason is not None)
