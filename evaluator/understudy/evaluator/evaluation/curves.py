"""ROC and precision-recall curves, and reliability, from counts of scores that do not grow with the examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from understudy.evaluator.types import Array

SCORE_BINS = 2**14
"""Bins of the scores of a whole dataset. Each covers 1/512 of log odds: at most 0.0005 of probability."""

SLICE_SCORE_COUNTS = 2**16
"""Bins of the scores of all labels of a slice together; with four labels or fewer each has `SCORE_BINS`."""

CURVE_POINTS = 200
"""Points that a stored curve has at most."""

RELIABILITY_BINS = 20
"""Bins of equal width from probability 0 to 1."""

_LIMIT = 16.0
"""Log odds beyond this, and so probabilities within 1.2e-7 of 0 or 1, share the outermost bins."""

_PRECISIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
_RECALLS = (0.5, 0.8, 0.9, 0.95, 0.99)


def log_odds(probabilities: Array) -> Array:
    """Return ``log(p / (1 - p))`` in float64, infinite for 0 and 1."""
    exact = probabilities.astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(exact) - np.log1p(-exact))


def sigmoid(logits: Array) -> Array:
    """Return the probabilities of log odds in float64, without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))))


def score_bins(odds: Array, bins: int) -> Array:
    """Return the bin of each log odds, ``[...]`` from 0 to ``bins - 1``, ascending with the score."""
    places = (np.clip(odds, -_LIMIT, _LIMIT) + _LIMIT) * (bins / (2 * _LIMIT))
    return np.minimum(places.astype(np.int64), bins - 1)


def bin_threshold(index: int, bins: int) -> float:
    """Return the least probability of a bin."""
    return 0.0 if index == 0 else float(sigmoid(np.asarray(index * (2 * _LIMIT) / bins - _LIMIT)))


def counted(values: Any) -> Any:
    """Return sums of weights as JSON values: whole numbers if they all are, as they are without weights."""
    array = np.asarray(values, np.float64)
    return (array.astype(np.int64) if np.array_equal(array, np.rint(array)) else array).tolist()


def grown(counts: Array, groups: int) -> Array:
    """Return counts ``[groups, ...]`` with at least so many groups; new ones are 0."""
    missing = groups - len(counts)
    if missing <= 0:
        return counts
    return np.concatenate([counts, np.zeros((max(missing, len(counts)), *counts.shape[1:]), counts.dtype)])


class LabelScores:
    """Counts the scores of labels that each hold for an item or not, in groups of items. For one thread.

    The counts are exact and do not depend on the batches, but for the rounding of weights. Every score within a bin
    counts as equal.

    Args:
        labels: The number of labels.
        bins: The number of bins for curves.
    """

    def __init__(self, labels: int, *, bins: int = SCORE_BINS) -> None:
        self._bins = bins
        self._scores = np.zeros((0, labels, 2, bins))
        self._reliability = Reliability(labels)

    def add(self, probabilities: Array, positives: Array, groups: Array, weights: Array) -> None:
        """Count scores.

        Args:
            probabilities: Float64 ``[items, labels]``.
            positives: Bool ``[items, labels]``.
            groups: The group of each item, int64 ``[items]``.
            weights: How much each item counts, float64 ``[items]``.
        """
        self._scores = grown(self._scores, int(groups.max(initial=0)) + 1)
        places = score_bins(log_odds(probabilities), self._bins)
        np.add.at(self._scores, (*_cells(groups, positives), places), weights[:, np.newaxis])
        self._reliability.add(probabilities, positives, groups, weights)

    def document(self, names: Sequence[str], *, group: int = 0, points: int = CURVE_POINTS) -> list[dict[str, Any]]:
        """Return the curves and the reliability of each label in a group as JSON values."""
        return [
            {
                "label": name,
                **curve_document(self._scores[group, index], points),
                **self._reliability.document(index, group=group),
            }
            for index, name in enumerate(names)
        ]


def _cells(groups: Array, positives: Array) -> tuple[Array, Array, Array]:
    """Return the group, the label and the kind of each score, ``[items, labels]`` each."""
    labels = np.broadcast_to(np.arange(positives.shape[1]), positives.shape)
    return np.broadcast_to(groups[:, np.newaxis], positives.shape), labels, positives.astype(np.int64)


class Reliability:
    """Compares probabilities with what came true, in bins of equal width and in groups of items. For one thread.

    A probability on the edge of two bins belongs to the lower one, as in scikit-learn's ``calibration_curve``.

    Args:
        labels: The number of labels.
    """

    def __init__(self, labels: int) -> None:
        self._counts = np.zeros((0, labels, 2, RELIABILITY_BINS))
        self._sums = np.zeros((0, labels, RELIABILITY_BINS))
        self._squares = np.zeros((0, labels))

    def add(self, probabilities: Array, positives: Array, groups: Array, weights: Array) -> None:
        """Count probabilities and what came true; see `LabelScores.add`."""
        needed = int(groups.max(initial=0)) + 1
        self._counts, self._sums, self._squares = (
            grown(counts, needed) for counts in (self._counts, self._sums, self._squares)
        )
        places = np.searchsorted(_INNER_EDGES, probabilities)
        group, label, kind = _cells(groups, positives)
        each = weights[:, np.newaxis]
        np.add.at(self._counts, (group, label, kind, places), each)
        np.add.at(self._sums, (group, label, places), each * probabilities)
        np.add.at(self._squares, (group, label), each * np.square(probabilities - positives))

    def document(self, index: int, *, group: int = 0) -> dict[str, Any]:
        """Return the bins of one label, its Brier score and its expected calibration error as JSON values."""
        negatives, positives = self._counts[group, index]
        sums = self._sums[group, index]
        counts = negatives + positives
        items = float(counts.sum())
        gaps = np.abs(sums - positives).sum()
        return {
            "brier": _ratio(float(self._squares[group, index]), items),
            "ece": _ratio(float(gaps), items),
            "reliability": {
                "negatives": counted(negatives),
                "positives": counted(positives),
                "mean_probability": [
                    _ratio(float(total), float(count)) for total, count in zip(sums, counts, strict=True)
                ],
            },
        }


_INNER_EDGES = np.linspace(0.0, 1.0, RELIABILITY_BINS + 1)[1:-1]


def curve_document(scores: Array, points: int = CURVE_POINTS) -> dict[str, Any]:
    """Return what the counts of a label's scores say about it, as JSON values.

    Args:
        scores: Float64 ``[2, bins]``, the counts of negatives and of positives.
        points: The number of points of the curve; the areas and the table of thresholds use all bins.
    """
    thresholds, true_positives, false_positives = _cumulated(scores)
    negatives, positives = (float(count) for count in scores.sum(axis=1))
    chosen = _spread(true_positives / (positives or 1.0), false_positives / (negatives or 1.0), points)
    bins = scores.shape[1]
    return {
        "positives": counted(positives),
        "negatives": counted(negatives),
        "auc": _roc_area(true_positives, false_positives, positives, negatives),
        "average_precision": _average_precision(true_positives, false_positives, positives),
        "curve": {
            "threshold": [bin_threshold(int(thresholds[index]), bins) for index in chosen],
            "true_positives": counted(true_positives[chosen]),
            "false_positives": counted(false_positives[chosen]),
        },
        "thresholds": list(_threshold_table(thresholds, true_positives, false_positives, positives, bins)),
    }


def _cumulated(scores: Array) -> tuple[Array, Array, Array]:
    """Return the bins that hold a score, descending, and the counts of positives and negatives from each one up."""
    occupied = np.flatnonzero(scores.sum(axis=0))[::-1]
    return occupied, scores[1, occupied].cumsum(), scores[0, occupied].cumsum()


def _roc_area(true_positives: Array, false_positives: Array, positives: float, negatives: float) -> float | None:
    """Return the area under the ROC curve by trapezoids; None without both kinds."""
    if not positives or not negatives:
        return None
    heights = np.concatenate([[0], true_positives]).astype(np.float64)
    widths = np.diff(np.concatenate([[0], false_positives]))
    return float((widths * (heights[1:] + heights[:-1])).sum() / 2 / positives / negatives)


def _average_precision(true_positives: Array, false_positives: Array, positives: float) -> float | None:
    """Return the sum of the precisions, weighted by the gain in recall; None without positives."""
    if not positives:
        return None
    gains = np.diff(np.concatenate([[0], true_positives]))
    return float((gains * (true_positives / (true_positives + false_positives))).sum() / positives)


def _spread(tpr: Array, fpr: Array, points: int) -> Array:
    """Return the indices of at most ``points`` points, evenly along the curve, with its ends."""
    if len(tpr) <= points:
        return np.arange(len(tpr))
    targets = np.linspace(0.0, float(tpr[-1] + fpr[-1]), points)
    return np.unique(np.minimum(np.searchsorted(tpr + fpr, targets), len(tpr) - 1))


def _threshold_table(
    thresholds: Array, true_positives: Array, false_positives: Array, positives: float, bins: int
) -> Iterator[dict[str, Any]]:
    """Yield the threshold with the best recall at each precision, and with the best precision at each recall."""
    if not positives:
        return
    precisions = true_positives / (true_positives + false_positives)
    recalls = true_positives / positives
    for kind, levels, values in (("precision", _PRECISIONS, precisions), ("recall", _RECALLS, recalls)):
        for level in levels:
            reached = np.flatnonzero(values >= level)
            if not len(reached):
                yield {"at": kind, "level": level, "threshold": None}
                continue
            index = int(reached[-1]) if kind == "precision" else int(reached[np.argmax(precisions[reached])])
            yield {
                "at": kind,
                "level": level,
                "threshold": bin_threshold(int(thresholds[index]), bins),
                "precision": float(precisions[index]),
                "recall": float(recalls[index]),
            }


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
