"""Tables of one output: confusion, curves and reliability of a classification, residuals of a regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from understudy.evaluator.evaluation.curves import (
    CURVE_POINTS,
    SCORE_BINS,
    SLICE_SCORE_BINS,
    LabelScores,
    Reliability,
    sigmoid,
)
from understudy.evaluator.evaluation.residuals import RESIDUAL_BITS, SLICE_RESIDUAL_BITS, Residuals
from understudy.evaluator.model.output_tasks import OutputTask, TaskKind
from understudy.evaluator.types import Array

MAX_CURVES = 32
"""Curves are kept for the labels of an output with at most so many of them."""

MAX_CLASSES = 1000
"""Confusions are counted for an output with at most so many classes."""

MAX_MATRIX_CLASSES = 64
"""A stored confusion matrix has at most so many classes; of more, the most frequent confusions are stored."""

_MOST_CONFUSED = 100
_SLICE_POINTS = 20
_BINARY_CLASSES = 2


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What a model decided about the items of a batch, and what is true.

    An item is an example, or a position of an example for sequences. Items with an output that is not a number or a
    target that is no class are left out.

    Attributes:
        right: Bool ``[examples]``: whether every item of the example is decided rightly; False if one is left out.
        examples: Int64 ``[items]``: the example in the batch that each item belongs to.
        predicted: The classes, int64 ``[items]``; for several labels at once bool ``[items, labels]``.
        actual: The same of the targets.
        probabilities: Float64 ``[items, labels]``, one label for two classes; None if they are not known.
        left_out: The number of items that are left out.
    """

    right: Array
    examples: Array
    predicted: Array
    actual: Array
    probabilities: Array | None
    left_out: int


def decide(task: OutputTask, outputs: Array, targets: Array) -> Decisions:
    """Return the decisions of a classification.

    Args:
        task: The task of the output; not a regression.
        outputs: Its values for a batch, ``[examples, ...]``.
        targets: The targets, ``[examples, ...]``.
    """
    if task.kind in {"binary", "multilabel"}:
        return _decide_labels(task, outputs, targets)
    return _decide_classes(task, outputs, targets)


def _decide_labels(task: OutputTask, outputs: Array, targets: Array) -> Decisions:
    is_binary = task.kind == "binary"
    width = 1 if is_binary else outputs.shape[-1]
    values = outputs.reshape(-1, width).astype(np.float64)
    wanted = targets.reshape(-1, width).astype(np.float64)
    items, kept = _kept(len(outputs), values, np.asarray(np.isfinite(wanted).all(axis=1)))
    probabilities = _label_probabilities(task, values[kept])
    is_hinge = task.scores == "unknown"
    predicted = values[kept] > 0.0 if is_hinge else probabilities > 0.5  # noqa: PLR2004 - as Keras's accuracy
    actual = wanted[kept] > (0.0 if is_hinge else 0.5)
    return Decisions(
        right=_all_right(len(outputs), items, kept, (predicted == actual).all(axis=1)),
        examples=items[kept],
        predicted=predicted[:, 0].astype(np.int64) if is_binary else predicted,
        actual=actual[:, 0].astype(np.int64) if is_binary else actual,
        probabilities=None if is_hinge or not _are_probabilities(probabilities) else probabilities,
        left_out=int((~kept).sum()),
    )


def _decide_classes(task: OutputTask, outputs: Array, targets: Array) -> Decisions:
    classes = outputs.shape[-1]
    values = outputs.reshape(-1, classes).astype(np.float64)
    if task.kind == "sparse":
        wanted = targets.reshape(-1).astype(np.int64)
        valid = (wanted >= 0) & (wanted < classes)
    else:
        wanted = targets.reshape(-1, classes).argmax(axis=1)
        valid = np.isfinite(targets.reshape(-1, classes).astype(np.float64)).all(axis=1)
    items, kept = _kept(len(outputs), values, valid)
    predicted, actual = values[kept].argmax(axis=1), wanted[kept]
    probabilities = _softmax(values[kept]) if task.scores == "logits" else values[kept]
    usable = task.scores != "unknown" and _are_probabilities(probabilities)
    return Decisions(
        right=_all_right(len(outputs), items, kept, predicted == actual),
        examples=items[kept],
        predicted=predicted,
        actual=actual,
        probabilities=probabilities if usable else None,
        left_out=int((~kept).sum()),
    )


def _kept(examples: int, values: Array, valid: Array) -> tuple[Array, Array]:
    """Return the example of each item, and which items are kept."""
    items = np.repeat(np.arange(examples), len(values) // examples)
    return items, valid & np.isfinite(values).all(axis=1)


def _all_right(examples: int, items: Array, kept: Array, right: Array) -> Array:
    wrong = np.zeros(examples, bool)
    wrong[items[~kept]] = True
    wrong[items[kept][~right]] = True
    return ~wrong


def _label_probabilities(task: OutputTask, values: Array) -> Array:
    return sigmoid(values) if task.scores == "logits" else values


def _are_probabilities(values: Array) -> bool:
    return not values.size or bool(values.min() >= -_TOLERANCE and values.max() <= 1 + _TOLERANCE)


_TOLERANCE = 1e-6


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


class OutputTables(Protocol):
    """The tables of one output of all examples, or of those of a slice. For one thread."""

    def document(self) -> dict[str, Any]:
        """Return the tables as JSON values."""


class ClassTables:
    """Confusions, curves and reliability of a classification with one class for each item.

    Args:
        classes: The number of classes.
        has_one_score: Whether the output is the probability of the second of two classes.
        is_slice: Whether it is one of many slices, whose curves have less resolution.
    """

    def __init__(self, classes: int, *, has_one_score: bool, is_slice: bool = False) -> None:
        self._classes = classes
        self._points = _SLICE_POINTS if is_slice else CURVE_POINTS
        self._confusion = np.zeros((classes, classes), np.int64) if classes <= MAX_CLASSES else None
        bins = SLICE_SCORE_BINS if is_slice else SCORE_BINS
        labels = 1 if has_one_score else classes
        self._has_one_score = has_one_score
        self._scores = LabelScores(labels, bins=bins) if labels <= MAX_CURVES else None
        self._confidence = None if has_one_score else Reliability(1)
        self._items = self._right = self._left_out = self._scored = 0
        self._squares = 0.0

    def add(self, decisions: Decisions, members: Array | None = None) -> None:
        """Count the items of a batch.

        Args:
            decisions: The decisions.
            members: Which items count, bool ``[items]``; None for all.
        """
        chosen = slice(None) if members is None else members
        predicted, actual = decisions.predicted[chosen], decisions.actual[chosen]
        self._items += len(actual)
        self._right += int((predicted == actual).sum())
        self._left_out += decisions.left_out if members is None else 0
        if self._confusion is not None:
            np.add.at(self._confusion, (actual, predicted), 1)
        if decisions.probabilities is not None:
            self._add_probabilities(np.clip(decisions.probabilities[chosen], 0.0, 1.0), predicted, actual)

    def _add_probabilities(self, probabilities: Array, predicted: Array, actual: Array) -> None:
        self._scored += len(actual)
        if self._scores is not None:
            numbers = np.ones(1, np.int64) if self._has_one_score else np.arange(self._classes)
            self._scores.add(probabilities, actual[:, np.newaxis] == numbers)
        if self._confidence is not None and len(actual):
            items = np.arange(len(actual))
            self._confidence.add(probabilities[items, predicted][:, np.newaxis], (predicted == actual)[:, np.newaxis])
            self._squares += float(
                np.square(probabilities).sum() - 2 * probabilities[items, actual].sum() + len(actual)
            )

    def document(self) -> dict[str, Any]:
        """See `OutputTables`."""
        names = [str(number) for number in range(self._classes)]
        has_curves = self._scores is not None and self._scored > 0
        return {
            "classes": self._classes,
            "items": self._items,
            "right": self._right,
            "left_out": self._left_out,
            **self._confusions(names),
            "labels": self._scores.document(["1"] if self._has_one_score else names, points=self._points)
            if self._scores is not None and has_curves
            else [],
            "confidence": self._confidence_document(),
            "notes": self._notes(),
        }

    def _confidence_document(self) -> dict[str, Any] | None:
        if self._confidence is None or not self._scored:
            return None
        return {**self._confidence.document(0), "brier": self._squares / self._scored}

    def _confusions(self, names: list[str]) -> dict[str, Any]:
        counts = self._confusion
        if counts is None:
            return {"confusion": None, "per_class": [], "most_confused": []}
        wrong = counts - np.diag(np.diag(counts))
        most = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_CONFUSED]
        pairs = [divmod(int(place), self._classes) for place in most if wrong.flat[place]]
        return {
            "confusion": counts.tolist() if self._classes <= MAX_MATRIX_CLASSES else None,
            "per_class": [
                {"label": name, "actual": int(rows), "predicted": int(columns), "right": int(right)}
                for name, rows, columns, right in zip(
                    names, counts.sum(axis=1), counts.sum(axis=0), np.diag(counts), strict=True
                )
            ],
            "most_confused": [
                {"actual": names[actual], "predicted": names[predicted], "count": int(counts[actual, predicted])}
                for actual, predicted in pairs
            ],
        }

    def _notes(self) -> list[str]:
        notes = []
        if self._classes > MAX_CLASSES:
            notes.append(f"confusions are counted for at most {MAX_CLASSES} classes, and there are {self._classes}")
        if self._scores is None:
            notes.append(f"curves are kept for at most {MAX_CURVES} classes, and there are {self._classes}")
        if self._scored < self._items:
            notes.append(_not_probabilities(self._items - self._scored))
        return notes


class MultiLabelTables:
    """Confusions, curves and reliability of a classification with any number of labels for each item.

    Args:
        labels: The number of labels.
        is_slice: Whether it is one of many slices, whose curves have less resolution.
    """

    def __init__(self, labels: int, *, is_slice: bool = False) -> None:
        self._labels = labels
        self._points = _SLICE_POINTS if is_slice else CURVE_POINTS
        self._counts = np.zeros((labels, 2, 2), np.int64)
        bins = SLICE_SCORE_BINS if is_slice else SCORE_BINS
        self._scores = LabelScores(labels, bins=bins) if labels <= MAX_CURVES else None
        self._items = self._right = self._left_out = self._scored = 0

    def add(self, decisions: Decisions, members: Array | None = None) -> None:
        """Count the items of a batch; see `ClassTables.add`."""
        chosen = slice(None) if members is None else members
        predicted, actual = decisions.predicted[chosen], decisions.actual[chosen]
        self._items += len(actual)
        self._right += int((predicted == actual).all(axis=1).sum())
        self._left_out += decisions.left_out if members is None else 0
        labels = np.broadcast_to(np.arange(self._labels), actual.shape)
        np.add.at(self._counts, (labels, actual.astype(np.int64), predicted.astype(np.int64)), 1)
        if decisions.probabilities is not None:
            self._scored += len(actual)
            if self._scores is not None:
                self._scores.add(np.clip(decisions.probabilities[chosen], 0.0, 1.0), actual)

    def document(self) -> dict[str, Any]:
        """See `OutputTables`."""
        names = [str(number) for number in range(self._labels)]
        notes = []
        if self._scores is None:
            notes.append(f"curves are kept for at most {MAX_CURVES} labels, and there are {self._labels}")
        if self._scored < self._items:
            notes.append(_not_probabilities(self._items - self._scored))
        return {
            "classes": self._labels,
            "items": self._items,
            "right": self._right,
            "left_out": self._left_out,
            "per_label": [
                {
                    "label": name,
                    "true_negatives": int(counts[0, 0]),
                    "false_positives": int(counts[0, 1]),
                    "false_negatives": int(counts[1, 0]),
                    "true_positives": int(counts[1, 1]),
                }
                for name, counts in zip(names[:MAX_CLASSES], self._counts, strict=False)
            ],
            "labels": self._scores.document(names, points=self._points) if self._scores is not None else [],
            "notes": notes,
        }


def _not_probabilities(items: int) -> str:
    return f"the outputs of {items} items are not known to be probabilities, so they have no part in the curves"


class RegressionTables:
    """The residuals of a regression.

    Args:
        components: The number of elements of the output for an example.
        is_slice: Whether it is one of many slices, whose histogram has less resolution.
    """

    def __init__(self, components: int, *, is_slice: bool = False) -> None:
        self._residuals = Residuals(components, bits=SLICE_RESIDUAL_BITS if is_slice else RESIDUAL_BITS)

    def add(self, outputs: Array, targets: Array, members: Array | None = None) -> None:
        """Count the residuals of a batch, ``[examples, components]``, or of the examples that are members."""
        chosen = slice(None) if members is None else members
        self._residuals.add(outputs[chosen], targets[chosen])

    def document(self) -> dict[str, Any]:
        """See `OutputTables`."""
        return self._residuals.document()


class OutputScoring:
    """The tables of one output: of the whole dataset, and of each slice. For one thread.

    Args:
        task: The task of the output.
    """

    def __init__(self, task: OutputTask) -> None:
        self._task = task
        self._whole: Any = None
        self._slices: dict[str, Any] = {}

    @property
    def has_items(self) -> bool:
        """Whether anything was counted."""
        return self._whole is not None

    def add(self, outputs: Array, targets: Array, slices: Mapping[str, Array]) -> Decisions | None:
        """Count a batch, and return the decisions of a classification.

        Args:
            outputs: The values of the output, ``[examples, ...]``.
            targets: Its targets, ``[examples, ...]``.
            slices: Which examples belong to each slice, bool ``[examples]`` by its name.
        """
        if self._task.kind == "unknown":
            self._task = replace(self._task, kind=_kind_of(outputs, targets))
        if self._task.kind == "regression":
            flat = outputs.reshape(len(outputs), -1)
            wanted = np.broadcast_to(targets, outputs.shape) if targets.ndim == outputs.ndim else targets
            self._add_residuals(flat, wanted.reshape(len(outputs), -1), slices)
            return None
        decisions = decide(self._task, outputs, targets)
        width = outputs.shape[-1]
        self._tables(None, width).add(decisions)
        for name, members in slices.items():
            self._tables(name, width).add(decisions, members[decisions.examples])
        return decisions

    def _add_residuals(self, outputs: Array, targets: Array, slices: Mapping[str, Array]) -> None:
        self._tables(None, outputs.shape[1]).add(outputs, targets)
        for name, members in slices.items():
            self._tables(name, outputs.shape[1]).add(outputs, targets, members)

    def document(self) -> dict[str, Any]:
        """Return the tables of the whole dataset."""
        return self._document(self._whole)

    def slice_document(self, name: str) -> dict[str, Any] | None:
        """Return the tables of a slice, or None if no example belongs to it."""
        return self._document(self._slices[name]) if name in self._slices else None

    def _document(self, tables: OutputTables) -> dict[str, Any]:
        return {"task": self._task.kind, "loss": self._task.loss, **tables.document()}

    def _tables(self, name: str | None, width: int) -> Any:
        if name is None:
            self._whole = self._whole or self._new(width, is_slice=False)
            return self._whole
        if name not in self._slices:
            self._slices[name] = self._new(width, is_slice=True)
        return self._slices[name]

    def _new(self, width: int, *, is_slice: bool) -> Any:
        if self._task.kind == "regression":
            return RegressionTables(width, is_slice=is_slice)
        if self._task.kind == "multilabel":
            return MultiLabelTables(width, is_slice=is_slice)
        is_binary = self._task.kind == "binary"
        return ClassTables(_BINARY_CLASSES if is_binary else width, has_one_score=is_binary, is_slice=is_slice)


def _kind_of(outputs: Array, targets: Array) -> TaskKind:
    """Return the task of an output whose loss does not tell: classes, if the targets are numbers of its classes."""
    has_one_target = targets.size * outputs.shape[-1] == outputs.size
    return "sparse" if targets.dtype.kind in "iu" and outputs.shape[-1] > 1 and has_one_target else "regression"
