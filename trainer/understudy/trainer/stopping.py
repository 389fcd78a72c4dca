"""When the evaluator's results say that training no longer helps. Imports no TensorFlow."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from understudy.checkpoints.evaluation_results import EvaluationResults, StepResult
from understudy.trainer.trainer_errors import StopRuleError

_log = logging.getLogger(__name__)

StopMode = Literal["min", "max"]

_FORM = "DATASET/METRIC:N, such as validation/loss:5"
_LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Stop when a metric has not improved for so many evaluations in a row.

    Attributes:
        dataset: The dataset on which the evaluator scores.
        metric: The metric.
        evaluations: How many evaluations, counted in the order of steps, may go by without an improvement.
        mode: Whether less or more of the metric is better.
    """

    dataset: str
    metric: str
    evaluations: int
    mode: StopMode

    def reason_to_stop(self, results: Iterable[StepResult], *, up_to_step: int) -> str | None:
        """Return why to stop, as a sentence, or None if training may go on.

        A value that is not a finite number is no improvement. Equal values are none either.

        Args:
            results: By ascending step.
            up_to_step: Results of later steps, which an earlier training may have left, do not count.

        Raises:
            ValueError: The evaluator scores on no such dataset, or the metric is not among its scores.
        """
        best: tuple[int, float] | None = None
        since = 0
        for result in results:
            value = self._value(result) if result.step <= up_to_step else None
            if value is None:
                continue
            since += 1
            if math.isfinite(value) and (best is None or self._is_better(value, best[1])):
                best, since = (result.step, value), 0
        if since < self.evaluations:
            return None
        held = "no number so far" if best is None else f"{best[1]:.6g} at step {best[0]}"
        return f"{self.dataset}/{self.metric} has not improved in {since} evaluations; the best is {held}"

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
        if self.metric not in metrics:
            raise ValueError(f"{self.dataset!r} has no metric {self.metric!r}; it has {', '.join(sorted(metrics))}")
        return metrics[self.metric]


def stop_rule(monitor: str, *, patience: int, mode: StopMode | None = None) -> StopRule:
    """Return a rule, from what `keras.callbacks.EarlyStopping` calls its arguments.

    Args:
        monitor: ``DATASET/METRIC``.
        patience: How many evaluations may go by without an improvement, from 1 up.
        mode: Whether less or more of the metric is better; may be left out for a loss, of which less is.

    Raises:
        ValueError: An argument cannot be used. The text names it, what came and what was expected.
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
        mode: Whether less or more of the metric is better; may be left out for a loss, of which less is.

    Raises:
        ValueError: The text has another form, or it is not said which direction is better.
    """
    name, _, count = text.rpartition(":")
    dataset, _, metric = name.partition("/")
    if not (dataset and metric and count.isdecimal() and int(count) > 0):
        raise ValueError(f"is {text!r}; give {_FORM}")
    if mode is None and metric != _LOSS:
        raise ValueError(f"is {text!r}; say with stop_mode whether less (min) or more (max) of {metric} is better")
    return StopRule(dataset=dataset, metric=metric, evaluations=int(count), mode=mode or "min")


class ResultsWatch:
    """Asks an evaluator's results whether to stop. For one thread at a time.

    Args:
        rule: When to stop.
        state_dir: The evaluator's state folder, which need not exist yet.
    """

    def __init__(self, rule: StopRule, state_dir: Path) -> None:
        self._rule = rule
        self._results = EvaluationResults(state_dir)

    def reason_to_stop(self, step: int) -> str | None:
        """Return why to stop at a step, or None if training may go on or the results cannot be read at the moment.

        Raises:
            StopRuleError: The evaluator scores on no such dataset, or has no such metric.
            UnsupportedFormatError: The results are of another version.
        """
        try:
            return self._rule.reason_to_stop(self._results.read(), up_to_step=step)
        except OSError as error:
            _log.warning("the evaluator's results could not be read, training goes on: %s", error)
            return None
        except ValueError as error:
            raise StopRuleError(f"the rule when to stop cannot apply: {error}") from error
