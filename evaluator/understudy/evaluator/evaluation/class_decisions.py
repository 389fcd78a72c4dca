"""What a model decided about the examples of a batch: the class or labels of each item, and which are right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from understudy.evaluator.evaluation.curves import sigmoid
from understudy.evaluator.types import Array, Arrays, OutputTask

_TOLERANCE = 1e-6

_ROUNDING = 0.01  # of a sum of probabilities in float16

_UNKNOWN = OutputTask(kind="unknown")
_LABELS = OutputTask(kind="multilabel", scores="probabilities")

_FLOATS = "fV"
"""The kinds of dtypes of floating-point numbers; bfloat16 and others have none of NumPy's own."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What a model decided about the items of a batch, and what is true.

    An item is an example, or a position of an example for sequences; those that the output's mask hides are no items.
    Items with an output that is not a number or a target that is no class are left out.

    Attributes:
        right: Bool ``[examples]``: whether every item of the example is decided rightly; False if one is left out.
        examples: Int64 ``[items]``: the example in the batch that each item belongs to.
        predicted: The classes, int64 ``[items]``; for several labels at once bool ``[items, labels]``.
        actual: The same of the targets.
        probabilities: Float64 ``[items, labels]``, one label for two classes; None if they are not known.
        weights: How much each item counts, float64 ``[items]``.
        left_out: The number of items that are left out.
    """

    right: Array
    examples: Array
    predicted: Array
    actual: Array
    probabilities: Array | None
    weights: Array
    left_out: int

    def of(self, items: Array) -> Decisions:
        """Return the decisions about some items, by their indices; an item may occur several times."""
        return replace(
            self,
            examples=self.examples[items],
            predicted=self.predicted[items],
            actual=self.actual[items],
            probabilities=None if self.probabilities is None else self.probabilities[items],
            weights=self.weights[items],
        )


class LabelNotes:
    """Notices labels that the loss of an output is not for, and targets that are not numbers. For one thread.

    Args:
        tasks: What each output of the model is for, by its name.
    """

    def __init__(self, tasks: Mapping[str, OutputTask]) -> None:
        self._outputs = [
            name for name, task in tasks.items() if task.kind in {"binary", "multilabel"} and task.scores != "unknown"
        ]
        self._limits: dict[str, tuple[float, float]] = {}
        self._missing: dict[str, int] = {}
        self._soft: dict[str, int] = {}

    def add(self, targets: Arrays) -> None:
        """Add the targets of a batch by the names of outputs."""
        for name, values in targets.items():
            if values.dtype.kind == "f" and (missing := int(np.isnan(values).sum())):
                self._missing[name] = self._missing.get(name, 0) + missing
        for name in targets.keys() & self._outputs:
            labels = targets[name]
            if labels.size and labels.dtype.kind in "biuf":
                low, high = self._limits.get(name, (np.inf, -np.inf))
                # What is not a number is left out.
                smallest, largest = (extreme.reduce(labels, axis=None) for extreme in (np.fmin, np.fmax))
                self._limits[name] = float(np.fmin(low, smallest)), float(np.fmax(high, largest))
                self._soft[name] = self._soft.get(name, 0) + int(((labels > 0) & (labels < 1)).sum())

    def notes(self) -> tuple[str, ...]:
        """Return a sentence about each output with such labels or targets."""
        limits = (
            f"labels of {name!r} are from {low:g} to {high:g}; its loss is for labels from 0 to 1"
            for name, (low, high) in sorted(self._limits.items())
            if low < 0 or high > 1
        )
        soft = (
            f"{count} {'label' if count == 1 else 'labels'} of {name!r} {'is' if count == 1 else 'are'} between "
            "0 and 1; accuracy, precision, recall and AUC are for labels of 0 and 1"
            for name, count in sorted(self._soft.items())
            if count
        )
        missing = (
            f"{count} values of the targets of {name!r} are not numbers"
            if count > 1
            else f"1 value of the targets of {name!r} is not a number"
            for name, count in sorted(self._missing.items())
        )
        return (*limits, *soft, *missing)

    def stored(self) -> dict[str, Any]:
        """Return what was found, for `restore`: plain values."""
        return {
            "limits": {name: list(limits) for name, limits in self._limits.items()},
            "missing": self._missing,
            "soft": self._soft,
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Go on from what `stored` returned."""
        self._limits = {name: (low, high) for name, (low, high) in stored["limits"].items()}
        self._missing = dict(stored["missing"])
        self._soft = dict(stored["soft"])


def predicted_classes(task: OutputTask, outputs: Array) -> Array | None:
    """Return the predicted class of each example, int64 ``[examples]``; None if there is not one.

    Of an unknown task it is the largest value, whatever `task_by_values` says: two versions must have the same slices.

    Args:
        task: The task of the output.
        outputs: Its values for a batch, ``[examples, ...]``: scores of the classes, or of class 1 alone.
    """
    if task.kind in {"regression", "multilabel"} or outputs.ndim > 2:  # noqa: PLR2004 - [examples, classes]
        return None
    scores = outputs.reshape(len(outputs), -1)
    if scores.shape[1] == 1:
        is_one = holds(task, scores[:, 0]) if task.kind == "binary" else scores[:, 0] > 0.5  # noqa: PLR2004
        return is_one.astype(np.int64)
    return None if task.kind == "binary" else np.asarray(scores.argmax(axis=1))


def decide(task: OutputTask, outputs: Array, targets: Array, weights: Array | None = None) -> Decisions:
    """Return the decisions of a classification.

    Args:
        task: The task of the output; not a regression.
        outputs: Its values for a batch, ``[examples, ...]``.
        targets: The targets, ``[examples, ...]``.
        weights: How much each item counts, float64 ``[examples, items of an example]``, NaN for those that a mask
            hides; 1 each if None.
    """
    if task.kind in {"binary", "multilabel"}:
        return _decide_labels(task, outputs, targets, weights)
    return _decide_classes(task, outputs, targets, weights)


def holds(task: OutputTask, values: Array) -> Array:
    """Return which labels hold, bool, in the shape of the values of an output with two classes or several labels."""
    return values > task.threshold


def task_by_values(task: OutputTask | None, values: Array) -> OutputTask:
    """Return the task of an output, which its values tell where neither its loss nor its metrics do.

    Several probabilities of an example that do not add up to 1 are those of labels, of which each holds or not. One
    such example is enough; those with values that are not finite tell nothing.

    Args:
        task: The task; None if it is not known.
        values: Values of the output, ``[examples, ...]``.
    """
    known = task or _UNKNOWN
    return _LABELS if known.kind == "unknown" and _are_of_labels(values) else known


def _are_of_labels(values: Array) -> bool:
    if values.ndim < 2 or values.shape[-1] < 2 or values.dtype.kind not in _FLOATS:  # noqa: PLR2004 - [examples, labels]
        return False
    numbers = values.astype(np.float32)
    finite = numbers[np.isfinite(numbers).all(axis=-1)]
    adds_up = np.abs(finite.sum(axis=-1) - 1.0) < _ROUNDING
    return bool(((finite >= 0.0) & (finite <= 1.0)).all() and not adds_up.all())


def decided(task: OutputTask, values: Array) -> Array | None:
    """Return what the values ``[examples, ...]`` of an output decide, without the targets; None for no decision.

    Labels that hold are bool, in the shape of the values; classes int64 ``[examples, ...]`` without the last axis. An
    output of an unknown task with several values along its last axis has classes; see `task_by_values`.
    """
    if values.dtype.kind not in _FLOATS:
        return None
    if task.kind in {"binary", "multilabel"}:
        return holds(task, values.astype(np.float32))
    has_classes = values.ndim > 1 and values.shape[-1] > 1 and task.kind != "regression"
    return np.asarray(values.astype(np.float32).argmax(axis=-1)) if has_classes else None


def decisions_as_targets(tasks: Mapping[str, OutputTask], outputs: Arrays) -> Arrays:
    """Return what outputs ``[examples, ...]`` decide as targets of the same names: labels and classes, int64.

    An output that decides nothing, such as a number, is its own target.

    Args:
        tasks: The tasks of the outputs, as far as they are known; else their values tell.
        outputs: The outputs.
    """
    found = {name: decided(task_by_values(tasks.get(name), values), values) for name, values in outputs.items()}
    return {name: outputs[name] if each is None else each.astype(np.int64) for name, each in found.items()}


def _decide_labels(task: OutputTask, outputs: Array, targets: Array, given: Array | None) -> Decisions:
    is_binary = task.kind == "binary"
    width = 1 if is_binary else outputs.shape[-1]
    values = outputs.reshape(-1, width).astype(np.float64)
    wanted = targets.reshape(-1, width).astype(np.float64)
    weights = np.ones(len(values)) if given is None else given.ravel()
    items, kept = _kept(len(outputs), values, np.isfinite(wanted).all(axis=1) & ~np.isnan(weights))
    probabilities = _label_probabilities(task, values[kept])
    is_hinge = task.scores == "unknown"
    predicted = holds(task, values[kept])
    actual = wanted[kept] > (0.0 if is_hinge else 0.5)
    return Decisions(
        right=_all_right(len(outputs), items, kept, (predicted == actual).all(axis=1), weights),
        examples=items[kept],
        predicted=predicted[:, 0].astype(np.int64) if is_binary else predicted,
        actual=actual[:, 0].astype(np.int64) if is_binary else actual,
        probabilities=None if is_hinge or not _are_probabilities(probabilities) else probabilities,
        weights=weights[kept],
        left_out=int((~kept & ~np.isnan(weights)).sum()),
    )


def _decide_classes(task: OutputTask, outputs: Array, targets: Array, given: Array | None) -> Decisions:
    classes = outputs.shape[-1]
    values = outputs.reshape(-1, classes).astype(np.float64)
    weights = np.ones(len(values)) if given is None else given.ravel()
    if task.kind == "sparse":
        wanted = targets.reshape(-1).astype(np.int64)
        valid = (wanted >= 0) & (wanted < classes)
    else:
        wanted = targets.reshape(-1, classes).argmax(axis=1)
        valid = np.isfinite(targets.reshape(-1, classes).astype(np.float64)).all(axis=1)
    items, kept = _kept(len(outputs), values, valid & ~np.isnan(weights))
    predicted, actual = values[kept].argmax(axis=1), wanted[kept]
    probabilities = _softmax(values[kept]) if task.scores == "logits" else values[kept]
    usable = task.scores != "unknown" and _are_probabilities(probabilities)
    return Decisions(
        right=_all_right(len(outputs), items, kept, predicted == actual, weights),
        examples=items[kept],
        predicted=predicted,
        actual=actual,
        probabilities=probabilities if usable else None,
        weights=weights[kept],
        left_out=int((~kept & ~np.isnan(weights)).sum()),
    )


def _kept(examples: int, values: Array, valid: Array) -> tuple[Array, Array]:
    """Return the example of each item, and which items are kept."""
    items = np.repeat(np.arange(examples), len(values) // examples)
    return items, valid & np.isfinite(values).all(axis=1)


def _all_right(examples: int, items: Array, kept: Array, right: Array, weights: Array) -> Array:
    wrong = np.zeros(examples, bool)
    wrong[items[~kept & ~np.isnan(weights)]] = True
    wrong[items[kept][~right]] = True
    return ~wrong


def _label_probabilities(task: OutputTask, values: Array) -> Array:
    return sigmoid(values) if task.scores == "logits" else values


def _are_probabilities(values: Array) -> bool:
    return not values.size or bool(values.min() >= -_TOLERANCE and values.max() <= 1 + _TOLERANCE)


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def item_weights(examples: int, items: int, weights: Array | None, mask: Array | None) -> Array:
    """Return how much the items of an output count, float64 ``[examples, items]``; NaN for those that a mask hides.

    Args:
        examples: The number of examples.
        items: The number of items of each.
        weights: Weights ``[examples, ...]`` of the examples or of their elements; 1 each if None.
        mask: Which elements count, bool ``[examples, ...]``; all if None.
    """
    found = np.ones((examples, items))
    if weights is not None:
        found = found * _spread_over(weights.astype(np.float64), items)
    if mask is not None:
        found = np.where(_spread_over(mask.astype(np.bool_), items), found, np.nan)
    return found


def _spread_over(values: Array, items: int) -> Array:
    """Return values ``[examples, ...]`` for each item, ``[examples, items]``; each may stand for several items."""
    flat = values.reshape(len(values), -1)
    return np.repeat(flat, max(1, items // max(1, flat.shape[1])), axis=1)
