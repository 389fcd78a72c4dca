"""Finds metrics that are undefined on what they counted, although Keras gives a number: 0 for a quotient of 0 and 0.

That is read from the state of a metric, by the class whose ``result`` it has. A metric with a ``result`` of its own is
never undefined. The loss is a mean over the examples of a batch, whatever they weigh, so its state does not tell; it
is undefined where no output has an element that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from understudy.evaluator.types import Array

NO_MEAN = "the weights of what it averages add up to 0"
NO_LABEL = "no label counts: all have a weight of 0 or are masked"
NO_POSITIVE = "no label that counts is positive"
NO_NEGATIVE = "no label that counts is negative"
NO_POSITIVE_OF_ONE = "one of the labels that it averages is positive in no example that counts"
NO_NEGATIVE_OF_ONE = "one of the labels that it averages is negative in no example that counts"
NO_PREDICTION = "no prediction that counts is positive"
NO_TARGET = "no target counts: all have a weight of 0"
SAME_TARGETS = "all targets that count are the same"
NO_CLASS = "none of its classes is among the labels and predictions that count"
NO_CLASS_OF_MEAN = "one of the classes that it averages is neither among the labels nor the predictions that count"
SAME_ON_AXIS = "along its axis, the targets or the outputs of an example are all the same, or there is only one of them"
NEGATIVE_OUTPUT = "an output is negative, and has no logarithm"
NO_LOSS = "no example counts: all sample weights are 0, or masks hide all elements"

_RESOLUTION = 2.0**-21
"""A variance below this share of the mean square is rounding: variables are float32."""

Found = Sequence[tuple[str, Array]]
"""Reasons, each with where it holds: bool ``[states]``, or ``[states, values]`` for a metric with several values."""


@dataclass(frozen=True, kw_only=True)
class Undefined:
    """At which of some states a value is undefined, and why.

    Attributes:
        reasons: The reasons there may be.
        places: 0 where it is defined, else the place of the reason from 1 up, uint8 ``[states]``.
    """

    reasons: tuple[str, ...]
    places: Array

    def reason(self, state: int = 0) -> str:
        """Return why it is undefined at a state; empty if it is not."""
        place = int(self.places[state])
        return self.reasons[place - 1] if place else ""

    def of(self, states: slice) -> Undefined:
        """Return the same of some of the states."""
        return Undefined(reasons=self.reasons, places=self.places[states])


def _undefined(found: Iterable[tuple[str, Array]]) -> Undefined:
    """Return where the first of the reasons holds."""
    reasons, holds = zip(*found, strict=True)
    return Undefined(
        reasons=reasons, places=np.select(holds, [np.uint8(place) for place in range(1, len(holds) + 1)], np.uint8(0))
    )


class UndefinedValues:
    """The rules for the metrics of a model. Immutable.

    Args:
        named: The metrics by their names in a result.
        variables: The variables that a state has the values of, in order.
        loss: The mean of the loss; None if there is none. Where it is not a number, no metric need be one.
    """

    def __init__(self, named: Iterable[tuple[str, Any]], variables: Sequence[Any], loss: Any = None) -> None:
        places = {id(variable): place for place, variable in enumerate(variables)}
        self._loss = None if loss is None else places[id(loss.total)]
        self._rules: list[tuple[str, Callable[..., Found], Any, list[int]]] = []
        for name, metric in named:
            if (known := _RULES.get(type(metric), _RULES.get(type(metric).result))) is not None:
                rule, needed = known
                own = [places.get(id(getattr(metric, variable))) for variable in needed]
                self._rules.append((name, rule, metric, [place for place in own if place is not None]))

    def find(self, values: Sequence[Array]) -> dict[str, Undefined]:
        """Return what may be undefined at some states, by name; ``name/0``, ... if a metric has several values.

        Args:
            values: The values of each variable, ``[states, ...]``.
        """
        found: dict[str, Undefined] = {}
        with_loss = np.True_ if self._loss is None else ~np.isnan(values[self._loss])
        for name, rule, metric, needed in self._rules:
            reasons = rule(metric, *(np.asarray(values[place], np.float64) for place in needed))
            if rule is _of_mean_of_numbers:
                reasons = [(reason, holds & with_loss) for reason, holds in reasons]
            if reasons[0][1].ndim == 1:
                found[name] = _undefined(reasons)
            else:
                for index in range(reasons[0][1].shape[1]):
                    found[f"{name}/{index}"] = _undefined((reason, holds[:, index]) for reason, holds in reasons)
        return {name: each for name, each in found.items() if each.places.any()}


def undefined_losses(outputs: Sequence[str], without: Mapping[str, Array]) -> dict[str, Undefined]:
    """Return the losses of which no element counts, by their names in a result.

    Args:
        outputs: The names of all outputs of the model.
        without: By output, at which states none of its elements counts, bool ``[states]``; others always have some.
    """
    found = {} if len(outputs) == 1 else {f"{name}_loss": holds for name, holds in without.items()}
    if without.keys() >= set(outputs):
        found["loss"] = np.logical_and.reduce(list(without.values()))
    return {name: _undefined([(NO_LOSS, holds)]) for name, holds in found.items() if holds.any()}


def _of_mean(_: Any, count: Array) -> Found:
    return [(NO_MEAN, count == 0)]


def _of_mean_of_numbers(metric: Any, total: Array, count: Array) -> Found:
    """A mean that is not a number is undefined, unless the outputs are not numbers, either."""
    return [*_of_mean(metric, count), (_NOT_A_NUMBER[type(metric)], np.isnan(total))]


def _of_curve(metric: Any, *counts: Array) -> Found:
    """A curve needs positive labels, and negative ones unless it is of precision and recall.

    The counts are ``[states, thresholds, ...]``.
    """
    true_positives, false_negatives, false_positives, true_negatives = (count[:, 0] for count in counts)
    no_positive, no_negative = true_positives + false_negatives == 0, false_positives + true_negatives == 0
    is_mean = no_positive.ndim > 1
    found = [(NO_LABEL, no_positive & no_negative), (NO_POSITIVE_OF_ONE if is_mean else NO_POSITIVE, no_positive)]
    if type(metric).result not in _OF_PRECISION and metric.get_config().get("curve") != "PR":
        found.append((NO_NEGATIVE_OF_ONE if is_mean else NO_NEGATIVE, no_negative))
    return [(reason, holds.reshape(len(holds), -1).any(axis=1)) for reason, holds in found]


def _of_precision(metric: Any, true_positives: Array, false_positives: Array) -> Found:
    return [(NO_PREDICTION, _by_threshold(metric, true_positives + false_positives == 0))]


def _of_recall(metric: Any, true_positives: Array, false_negatives: Array) -> Found:
    return [(NO_POSITIVE, _by_threshold(metric, true_positives + false_negatives == 0))]


def _by_threshold(metric: Any, holds: Array) -> Array:
    return holds[:, 0] if len(metric.thresholds) == 1 else holds


def _of_f_score(metric: Any, labels: Array, predictions_alone: Array) -> Found:
    """Both are ``[states, classes]``, or of all classes, ``[states]``.

    ``labels`` are those that are positive, ``predictions_alone`` the positive predictions that are wrong. A mean over
    classes is undefined like that of scikit-learn: where a class has neither.
    """
    none = labels == 0
    if metric.average is None or none.ndim == 1:
        return [(NO_POSITIVE, none)]
    found = [(NO_POSITIVE, none.all(axis=1))]
    if metric.average == "macro":
        found.append((NO_CLASS_OF_MEAN, (none & (predictions_alone == 0)).any(axis=1)))
    return found


def _of_r2(metric: Any, count: Array, squares: Array, total: Array) -> Found:
    with np.errstate(invalid="ignore"):  # infinite targets
        variance = squares - np.divide(total**2, count, out=np.zeros_like(total), where=count != 0)
    found = [(NO_TARGET, count == 0), (SAME_TARGETS, variance <= _RESOLUTION * squares)]
    if metric.class_aggregation is None:
        return found
    reduced = np.any if metric.class_aggregation == "uniform_average" else np.all
    return [(reason, reduced(holds, axis=1)) for reason, holds in found]


def _of_iou(metric: Any, confusions: Array) -> Found:
    diagonal = np.diagonal(confusions, axis1=1, axis2=2)
    present = confusions.sum(axis=1) + confusions.sum(axis=2) - diagonal
    return [(NO_CLASS, ~present[:, list(metric.target_class_ids)].any(axis=1))]


_NOT_A_NUMBER = {keras.metrics.PearsonCorrelation: SAME_ON_AXIS, keras.metrics.Poisson: NEGATIVE_OUTPUT}
_OF_PRECISION = (keras.metrics.PrecisionAtRecall.result, keras.metrics.RecallAtPrecision.result)

_CURVE = (_of_curve, ("true_positives", "false_negatives", "false_positives", "true_negatives"))
_MEAN = (_of_mean, ("count",))

_RULES: Mapping[Any, tuple[Callable[..., Found], tuple[str, ...]]] = {
    **dict.fromkeys(_NOT_A_NUMBER, (_of_mean_of_numbers, ("total", "count"))),
    keras.metrics.Mean.result: _MEAN,
    keras.metrics.RootMeanSquaredError.result: _MEAN,
    keras.metrics.AUC.result: _CURVE,
    keras.metrics.SensitivityAtSpecificity.result: _CURVE,
    keras.metrics.SpecificityAtSensitivity.result: _CURVE,
    keras.metrics.PrecisionAtRecall.result: _CURVE,
    keras.metrics.RecallAtPrecision.result: _CURVE,
    keras.metrics.Precision.result: (_of_precision, ("true_positives", "false_positives")),
    keras.metrics.Recall.result: (_of_recall, ("true_positives", "false_negatives")),
    keras.metrics.FBetaScore.result: (_of_f_score, ("intermediate_weights", "false_positives")),
    keras.metrics.R2Score.result: (_of_r2, ("count", "squared_sum", "sum")),
    keras.metrics.IoU.result: (_of_iou, ("total_cm",)),
}
"""By the class, or by the function that computes the result: the rule, and the variables that it reads."""
