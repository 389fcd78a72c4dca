"""Tables of one output: confusion, curves and reliability of a classification, residuals of a regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from understudy.evaluator.evaluation.class_decisions import Decisions, decide, item_weights
from understudy.evaluator.evaluation.curves import (
    CURVE_POINTS,
    SCORE_BINS,
    SLICE_SCORE_COUNTS,
    LabelScores,
    Reliability,
    counted,
    grown,
)
from understudy.evaluator.evaluation.residuals import RESIDUAL_BITS, SLICE_RESIDUAL_BITS, Residuals
from understudy.evaluator.types import Array, OutputTask, TaskKind

MAX_CURVES = 32
"""Curves are kept for the labels of an output with at most so many of them."""

MAX_CLASSES = 1000
"""Confusions are counted for an output with at most so many classes."""

MAX_MATRIX_CLASSES = 64
"""A stored confusion matrix has at most so many classes; of more, the most frequent confusions are stored."""

MAX_SLICE_CLASSES = 100
"""The same for slices, of which there may be many."""

_MOST_CONFUSED = 100
_BINARY_CLASSES = 2

_TEXT = "OSU"
"""The kinds of dtypes of text."""


class OutputTables(Protocol):
    """The tables of one output, in groups of items. For one thread."""

    def document(self, group: int = 0) -> dict[str, Any]:
        """Return the tables of a group as JSON values."""


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """How fine tables are.

    Attributes:
        score_counts: The most bins of the scores of all labels together.
        points: The most points of a stored curve.
        residual_bits: The leading bits of a float32 that tell bins of residuals apart.
        max_classes: Confusions are counted for an output with at most so many classes.
    """

    score_counts: int
    points: int
    residual_bits: int
    max_classes: int

    def scores(self, labels: int) -> LabelScores | None:
        """Return what counts the scores of so many labels; None if there are too many."""
        return LabelScores(labels, bins=min(SCORE_BINS, self.score_counts // labels)) if labels <= MAX_CURVES else None


_WHOLE = Resolution(
    score_counts=SCORE_BINS * MAX_CURVES, points=CURVE_POINTS, residual_bits=RESIDUAL_BITS, max_classes=MAX_CLASSES
)
_SLICES = Resolution(
    score_counts=SLICE_SCORE_COUNTS, points=20, residual_bits=SLICE_RESIDUAL_BITS, max_classes=MAX_SLICE_CLASSES
)


class ClassTables:
    """Confusions, curves and reliability of a classification with one class for each item.

    Args:
        classes: The number of classes.
        has_one_score: Whether the output is the probability of the second of two classes.
        resolution: How fine the tables are.
    """

    def __init__(self, classes: int, *, has_one_score: bool, resolution: Resolution) -> None:
        self._classes = classes
        self._resolution = resolution
        self._has_matrix = classes <= resolution.max_classes
        self._confusion = np.zeros((0, classes, classes) if self._has_matrix else (0, 0, 0))
        labels = 1 if has_one_score else classes
        self._has_one_score = has_one_score
        self._scores = resolution.scores(labels)
        self._confidence = None if has_one_score else Reliability(1)
        self._totals = np.zeros((0, 3))
        self._unscored = np.zeros(0, np.int64)
        self._squares = np.zeros(0)

    def add(self, decisions: Decisions, groups: Array) -> None:
        """Count decisions, each in its group, int64 ``[items]``."""
        needed = int(groups.max(initial=0)) + 1
        self._totals, self._squares = grown(self._totals, needed), grown(self._squares, needed)
        self._unscored = grown(self._unscored, needed)
        predicted, actual, weights = decisions.predicted, decisions.actual, decisions.weights
        _add_totals(self._totals, self._unscored, decisions, predicted == actual, groups)
        if self._has_matrix:
            self._confusion = grown(self._confusion, needed)
            np.add.at(self._confusion, (groups, actual, predicted), weights)
        if decisions.probabilities is not None:
            self._add_probabilities(np.clip(decisions.probabilities, 0.0, 1.0), predicted, actual, groups, weights)

    def _add_probabilities(
        self, probabilities: Array, predicted: Array, actual: Array, groups: Array, weights: Array
    ) -> None:
        if self._scores is not None:
            numbers = np.ones(1, np.int64) if self._has_one_score else np.arange(self._classes)
            self._scores.add(probabilities, actual[:, np.newaxis] == numbers, groups, weights)
        if self._confidence is not None:
            items = np.arange(len(actual))
            right = (predicted == actual)[:, np.newaxis]
            self._confidence.add(probabilities[items, predicted][:, np.newaxis], right, groups, weights)
            squares = np.square(probabilities).sum(axis=1) - 2 * probabilities[items, actual] + 1
            np.add.at(self._squares, groups, weights * squares)

    def document(self, group: int = 0) -> dict[str, Any]:
        """See `OutputTables`."""
        names = [str(number) for number in range(self._classes)]
        items, right, scored = (float(total) for total in self._totals[group])
        labels: list[dict[str, Any]] = []
        if self._scores is not None and scored:
            shown = ["1"] if self._has_one_score else names
            labels = self._scores.document(shown, group=group, points=self._resolution.points)
        confidence = None
        if self._confidence is not None and scored:
            confidence = {
                **self._confidence.document(0, group=group),
                "brier": float(self._squares[group]) / scored,
            }
        return {
            "classes": self._classes,
            "items": counted(items),
            "right": counted(right),
            **self._confusions(names, group),
            "labels": labels,
            "confidence": confidence,
            "notes": self._notes(int(self._unscored[group])),
        }

    def _confusions(self, names: list[str], group: int) -> dict[str, Any]:
        if not self._has_matrix:
            return {"confusion": None, "per_class": [], "most_confused": []}
        counts = self._confusion[group]
        wrong = counts - np.diag(np.diag(counts))
        most = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_CONFUSED]
        pairs = [divmod(int(place), self._classes) for place in most if wrong.flat[place]]
        return {
            "confusion": counted(counts) if self._classes <= MAX_MATRIX_CLASSES else None,
            "per_class": [
                {"label": name, "actual": counted(rows), "predicted": counted(columns), "right": counted(right)}
                for name, rows, columns, right in zip(
                    names, counts.sum(axis=1), counts.sum(axis=0), np.diag(counts), strict=True
                )
            ],
            "most_confused": [
                {"actual": names[actual], "predicted": names[predicted], "count": counted(counts[actual, predicted])}
                for actual, predicted in pairs
            ],
        }

    def _notes(self, without_scores: int) -> list[str]:
        notes = []
        if not self._has_matrix:
            most = self._resolution.max_classes
            notes.append(f"confusions are counted for at most {most} classes, and there are {self._classes}")
        if self._scores is None:
            notes.append(f"curves are kept for at most {MAX_CURVES} classes, and there are {self._classes}")
        if without_scores:
            notes.append(_not_probabilities(without_scores))
        return notes


class MultiLabelTables:
    """Confusions, curves and reliability of a classification with any number of labels for each item.

    Args:
        labels: The number of labels.
        resolution: How fine the tables are.
    """

    def __init__(self, labels: int, *, resolution: Resolution) -> None:
        self._labels = labels
        self._resolution = resolution
        self._counts = np.zeros((0, labels, 2, 2))
        self._scores = resolution.scores(labels)
        self._totals = np.zeros((0, 3))
        self._unscored = np.zeros(0, np.int64)

    def add(self, decisions: Decisions, groups: Array) -> None:
        """Count decisions, each in its group, int64 ``[items]``."""
        needed = int(groups.max(initial=0)) + 1
        self._totals, self._counts = grown(self._totals, needed), grown(self._counts, needed)
        self._unscored = grown(self._unscored, needed)
        predicted, actual, weights = decisions.predicted, decisions.actual, decisions.weights
        _add_totals(self._totals, self._unscored, decisions, (predicted == actual).all(axis=1), groups)
        labels = np.broadcast_to(np.arange(self._labels), actual.shape)
        cells = (groups[:, np.newaxis], labels, actual.astype(np.int64), predicted.astype(np.int64))
        np.add.at(self._counts, cells, weights[:, np.newaxis])
        if decisions.probabilities is not None and self._scores is not None:
            self._scores.add(np.clip(decisions.probabilities, 0.0, 1.0), actual, groups, weights)

    def document(self, group: int = 0) -> dict[str, Any]:
        """See `OutputTables`."""
        names = [str(number) for number in range(self._labels)]
        items, right, scored = (float(total) for total in self._totals[group])
        notes = []
        if self._scores is None:
            notes.append(f"curves are kept for at most {MAX_CURVES} labels, and there are {self._labels}")
        if self._unscored[group]:
            notes.append(_not_probabilities(int(self._unscored[group])))
        labels: list[dict[str, Any]] = []
        if self._scores is not None and scored:
            labels = self._scores.document(names, group=group, points=self._resolution.points)
        return {
            "classes": self._labels,
            "items": counted(items),
            "right": counted(right),
            "per_label": [
                {
                    "label": name,
                    "true_negatives": counted(counts[0, 0]),
                    "false_positives": counted(counts[0, 1]),
                    "false_negatives": counted(counts[1, 0]),
                    "true_positives": counted(counts[1, 1]),
                }
                for name, counts in zip(names[:MAX_CLASSES], self._counts[group], strict=False)
            ],
            "labels": labels,
            "notes": notes,
        }


def _add_totals(totals: Array, unscored: Array, decisions: Decisions, right: Array, groups: Array) -> None:
    """Count items, those that are right, and those with scores, by their weights; and those without scores."""
    has_scores = np.full(len(right), decisions.probabilities is not None)
    columns = np.stack([np.ones_like(right), right, has_scores], axis=1)
    np.add.at(totals, groups, columns * decisions.weights[:, np.newaxis])
    np.add.at(unscored, groups, ~has_scores)


def _not_probabilities(items: int) -> str:
    return f"the outputs of {items} items are not known to be probabilities, so they have no part in the curves"


class OutputScoring:
    """The tables of one output: of the whole dataset, and of each slice. For one thread.

    Args:
        task: The task of the output.

    Attributes:
        without: Why there are no tables, although there are targets; empty if there are.
    """

    def __init__(self, task: OutputTask) -> None:
        self.without = ""
        self._task = task
        self._whole: Any = None
        self._of_slices: Any = None
        self._groups: dict[str, int] = {}
        self._left_out = 0

    @property
    def has_items(self) -> bool:
        """Whether anything was counted."""
        return self._whole is not None

    def add(
        self,
        outputs: Array,
        targets: Array,
        slices: Mapping[str, Array],
        *,
        weights: Array | None = None,
        mask: Array | None = None,
    ) -> Decisions | None:
        """Count a batch, and return the decisions of a classification.

        Args:
            outputs: The values of the output, ``[examples, ...]``.
            targets: Its targets, ``[examples, ...]``.
            slices: Which examples belong to each slice, bool ``[examples]`` by its name.
            weights: How much its examples or elements count, ``[examples, ...]``; 1 each if None.
            mask: Which of its elements count, bool ``[examples, ...]``; all if None.
        """
        if self._task.kind == "unknown":
            self._task = replace(self._task, kind=_kind_of(outputs, targets))
        if self._task.kind == "regression":
            components = outputs.reshape(len(outputs), -1).shape[1]
            self._add_residuals(outputs, targets, slices, item_weights(len(outputs), components, weights, mask))
            return None
        width = 1 if self._task.kind == "binary" else outputs.shape[-1]
        of_example = outputs.size // max(1, len(outputs) * width)
        decisions = decide(self._task, outputs, targets, item_weights(len(outputs), of_example, weights, mask))
        self._left_out += decisions.left_out
        width = outputs.shape[-1]
        self._whole = self._whole or self._new(width, _WHOLE)
        self._whole.add(decisions, np.zeros(len(decisions.examples), np.int64))
        if slices:
            items, groups = self._members({name: held[decisions.examples] for name, held in slices.items()})
            self._of_slices = self._of_slices or self._new(width, _SLICES)
            self._of_slices.add(decisions.of(items), groups)
        return decisions

    def _add_residuals(self, outputs: Array, targets: Array, slices: Mapping[str, Array], weights: Array) -> None:
        wanted = _like_outputs(targets, outputs)
        if wanted is None:
            shown = "text" if targets.dtype.kind in _TEXT else f"the shape {_of_example(targets)}"
            self.without = f"its targets have {shown}, its values {_of_example(outputs)}, so there are no residuals"
            return
        flat = outputs.reshape(len(outputs), -1)
        self._whole = self._whole or self._new(flat.shape[1], _WHOLE)
        self._whole.add(flat, wanted, np.zeros(len(flat), np.int64), weights)
        if slices:
            items, groups = self._members(slices)
            self._of_slices = self._of_slices or self._new(flat.shape[1], _SLICES)
            self._of_slices.add(flat[items], wanted[items], groups, weights[items])

    def _members(self, slices: Mapping[str, Array]) -> tuple[Array, Array]:
        """Return the items of all slices, one after another, and the group of each."""
        items = {name: np.flatnonzero(held) for name, held in slices.items() if held.any()}
        groups = [self._groups.setdefault(name, len(self._groups)) for name in items]
        none = np.zeros(0, np.int64)
        return (
            np.concatenate([none, *items.values()]),
            np.repeat(np.asarray(groups, np.int64), [len(each) for each in items.values()]),
        )

    def document(self) -> dict[str, Any]:
        """Return the tables of the whole dataset."""
        return {"left_out": self._left_out, **self._document(self._whole, 0)}

    def slice_document(self, name: str) -> dict[str, Any] | None:
        """Return the tables of a slice, or None if it has none."""
        return self._document(self._of_slices, self._groups[name]) if name in self._groups else None

    def _document(self, tables: OutputTables, group: int) -> dict[str, Any]:
        return {"task": self._task.kind, "loss": self._task.loss, **tables.document(group)}

    def _new(self, width: int, resolution: Resolution) -> Any:
        if self._task.kind == "regression":
            return Residuals(width, bits=resolution.residual_bits)
        if self._task.kind == "multilabel":
            return MultiLabelTables(width, resolution=resolution)
        is_binary = self._task.kind == "binary"
        return ClassTables(_BINARY_CLASSES if is_binary else width, has_one_score=is_binary, resolution=resolution)


def _like_outputs(targets: Array, outputs: Array) -> Array | None:
    """Return the target of each element, or one for all, ``[examples, elements or 1]``; None if they do not fit."""
    if targets.dtype.kind in _TEXT:
        return None
    if targets.ndim == outputs.ndim:
        if any(own not in (1, length) for own, length in zip(targets.shape[1:], outputs.shape[1:], strict=True)):
            return None
        targets = np.broadcast_to(targets, outputs.shape)
    wanted = targets.reshape(len(outputs), -1)
    return wanted if wanted.shape[1] in (1, outputs[:1].size) else None


def _of_example(values: Array) -> str:
    return f"[{', '.join(map(str, ('examples', *values.shape[1:])))}]"


def _kind_of(outputs: Array, targets: Array) -> TaskKind:
    """Return the task of an output whose loss does not tell: classes, if the targets are numbers of its classes."""
    has_one_target = targets.size * outputs.shape[-1] == outputs.size
    return "sparse" if targets.dtype.kind in "iu" and outputs.shape[-1] > 1 and has_one_target else "regression"
