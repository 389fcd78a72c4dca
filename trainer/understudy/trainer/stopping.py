"""Stops a training when the evaluator's scores no longer improve. Imports no TensorFlow."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from understudy.checkpoints.evaluation_results import (
    UNKNOWN_CONFIGURATION,
    EvaluationResults,
    MetricConfiguration,
    StepResult,
)
from understudy.trainer.trainer_errors import StopRuleError

if TYPE_CHECKING:
    from understudy.trainer.job import Job
    from understudy.trainer.progress import ProgressReporter
    from understudy.trainer.settings import TrainSettings

_log = logging.getLogger(__name__)

StopMode = Literal["min", "max"]

_FORM = "DATASET/METRIC:N, such as validation/loss:5"
_LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Stop when a metric has not improved for a number of evaluations in a row.

    Attributes:
        dataset: The dataset on which the evaluator scores.
        metric: The metric.
        evaluations: Number of evaluations, in the order of steps, without an improvement before stopping.
        mode: Whether less or more of the metric is better.
    """

    dataset: str
    metric: str
    evaluations: int
    mode: StopMode

    def reason_to_stop(self, results: Iterable[StepResult], *, up_to_step: int) -> str | None:
        """Return the reason to stop, as a sentence, or None to continue.

        Neither a non-finite nor an equal value is an improvement. An evaluation in which the metric is undefined does
        not count. Only scores on the same examples as the newest score,
        of a metric configured as that of the newest score that says how, are compared.

        Args:
            results: By ascending step.
            up_to_step: Results of later steps, which an earlier training may have left, are ignored.

        Raises:
            ValueError: The evaluator scores on no such dataset, or the metric is not among its scores.
        """
        best: tuple[int, float] | None = None
        since = 0
        for result, value in self._comparable(result for result in results if result.step <= up_to_step):
            since += 1
            if math.isfinite(value) and (best is None or self._is_better(value, best[1])):
                best, since = (result.step, value), 0
        if since < self.evaluations:
            return None
        held = "no number so far" if best is None else f"{best[1]:.6g} at step {best[0]}"
        return f"{self.dataset}/{self.metric} has not improved in {since} evaluations; the best is {held}"

    def _comparable(self, results: Iterable[StepResult]) -> list[tuple[StepResult, float]]:
        """Return the results that have a value which can be compared with the newest one, with that value."""
        scored = [(result, value) for result in results if (value := self._value(result)) is not None]
        contents = [result.contents.get(self.dataset) for result, _ in scored]
        alike = [pair for pair, content in zip(scored, contents, strict=True) if content == contents[-1]]
        configurations = [self._configuration(result) for result, _ in alike]
        newest = next(filter(any, reversed(configurations)), UNKNOWN_CONFIGURATION)
        return [pair for pair, own in zip(alike, configurations, strict=True) if not own.is_other_than(newest)]

    def _configuration(self, result: StepResult) -> MetricConfiguration:
        return result.configurations.get(self.dataset, {}).get(self.metric, UNKNOWN_CONFIGURATION)

    def _is_better(self, value: float, than: float) -> bool:
        return value < than if self.mode == "min" else value > than

    def _value(self, result: StepResult) -> float | None:
        metrics = result.scores.get(self.dataset)
        if metrics is None:
            if result.settled and result.datasets and self.dataset not in result.datasets:
                raise ValueError(
                    f"no dataset is called {self.dataset!r}; there are {', '.join(sorted(result.datasets))}"
                )
            return None
        if self.metric in result.undefined.get(self.dataset, ()):
            return None
        if self.metric not in metrics:
            raise ValueError(f"{self.dataset!r} has no metric {self.metric!r}; it has {', '.join(sorted(metrics))}")
        return metrics[self.metric]


def stop_rule(monitor: str, *, patience: int, mode: StopMode | None = None) -> StopRule:
    """Return a rule from the arguments of `keras.callbacks.EarlyStopping`.

    Args:
        monitor: ``DATASET/METRIC``.
        patience: Number of evaluations without an improvement before stopping, at least 1.
        mode: Whether less or more of the metric is better; optional for a loss, where less is.

    Raises:
        ValueError: An argument is invalid. The text names it, its value and the expected form.
    """
    dataset, _, metric = monitor.partition("/")
    if not (dataset and metric):
        raise ValueError(f"monitor is {monitor!r}; give DATASET/METRIC, such as validation/loss")
    if patience < 1:
        raise ValueError(f"patience is {patience}; give a number of evaluations from 1 up")
    if mode is None and metric != _LOSS:
        raise ValueError(f"mode is missing; say whether less (min) or more (max) of {metric} is better")
    return StopRule(dataset=dataset, metric=metric, evaluations=patience, mode=mode or "min")


def parse_stop_rule(text: str, mode: StopMode | None = None) -> StopRule:
    """Read ``DATASET/METRIC:N``.

    Args:
        text: The rule.
        mode: Whether less or more of the metric is better; optional for a loss, where less is.

    Raises:
        ValueError: The text has another form, or the direction is missing.
    """
    name, _, count = text.rpartition(":")
    dataset, _, metric = name.partition("/")
    if not (dataset and metric and count.isdecimal() and int(count) > 0):
        raise ValueError(f"is {text!r}; give {_FORM}")
    if mode is None and metric != _LOSS:
        raise ValueError(f"is {text!r}; say with stop_mode whether less (min) or more (max) of {metric} is better")
    return StopRule(dataset=dataset, metric=metric, evaluations=int(count), mode=mode or "min")


class ResultsWatch:
    """Applies the rule to an evaluator's results. Not thread-safe.

    Args:
        rule: When to stop.
        state_dir: The evaluator's state folder, which need not exist yet.
    """

    def __init__(self, rule: StopRule, state_dir: Path) -> None:
        self._rule = rule
        self._results = EvaluationResults(state_dir)

    def reason_to_stop(self, step: int) -> str | None:
        """Return the reason to stop at a step, or None to continue, also if the results are unreadable at the moment.

        Raises:
            StopRuleError: The evaluator scores on no such dataset, or has no such metric.
            UnsupportedFormatError: The results have another version.
        """
        try:
            return self._rule.reason_to_stop(self._results.read(), up_to_step=step)
        except OSError as error:
            _log.warning("the evaluator's results could not be read, training continues: %s", error)
            return None
        except ValueError as error:
            raise StopRuleError(f"the rule when to stop cannot apply: {error}") from error


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
