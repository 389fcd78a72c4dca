"""Errors of regression: exact counts in bins of fixed relative width, whatever the range of the errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from understudy.evaluator.evaluation.curves import counted, grown
from understudy.evaluator.types import Array

RESIDUAL_BITS = 18
"""The leading bits of a float32 that tell bins apart for a whole dataset: a bin is at most 1/512 of its value wide."""

SLICE_RESIDUAL_BITS = 14
"""The same for a slice: a bin is at most 1/32 of its value wide."""

MAX_COMPONENTS = 64
"""Up to so many components of an output, such as the horizons of a forecast, are listed one by one."""

_BARS = 40
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_DRAWN = (0.005, 0.995)
"""The quantiles between which a histogram is drawn; what lies outside is counted at its ends."""

_SUM_ROUNDING = 1e-12

_WORD = 32
_SIGN = np.int64(2**31)


class Residuals:
    """Counts the differences of predictions and targets, in groups of examples. For one thread.

    Args:
        components: The number of elements of the output for an example.
        bits: How many leading bits of a float32 tell bins apart.
    """

    def __init__(self, components: int, *, bits: int = RESIDUAL_BITS) -> None:
        self._shift = _WORD - bits
        self._counts = np.zeros((0, 2**bits))
        self._items = np.zeros((0, 2, components))
        self._sums = np.zeros((0, 3, components))

    def add(self, predictions: Array, targets: Array, groups: Array, weights: Array) -> None:
        """Count residuals.

        Args:
            predictions: The predictions, ``[examples, components]``.
            targets: The targets, ``[examples, components]``.
            groups: The group of each example, int64 ``[examples]``.
            weights: How much each counts, float64 ``[examples, components]``; NaN for none that a mask keeps.
        """
        needed = int(groups.max(initial=0)) + 1
        self._counts, self._items, self._sums = (
            grown(counts, needed) for counts in (self._counts, self._items, self._sums)
        )
        residuals = predictions.astype(np.float64) - targets.astype(np.float64)
        kept = ~np.isnan(weights)
        usable = np.isfinite(residuals) & kept
        known, each = np.where(usable, residuals, 0.0), np.where(usable, weights, 0.0)
        np.add.at(self._items, groups, np.stack([kept & ~usable, each], axis=1))
        np.add.at(self._sums, groups, np.stack([each * known, each * np.abs(known), each * np.square(known)], axis=1))
        group = np.broadcast_to(groups[:, np.newaxis], residuals.shape)[usable]
        np.add.at(self._counts, (group, _bins(residuals[usable], self._shift)), weights[usable])

    def document(self, group: int = 0) -> dict[str, Any]:
        """Return the errors of a group and their histogram as JSON values."""
        left_out, kept = self._items[group]
        items = float(kept.sum())
        counts, sums = self._counts[group], self._sums[group]
        return {
            "items": counted(items),
            "left_out": int(left_out.sum()),
            **_errors(sums.sum(axis=1), items),
            "quantiles": self._quantiles(counts) if items else {},
            "histogram": self._histogram(counts) if items else None,
            "components": [
                {"items": counted(count), **_errors(own, float(count))} for count, own in zip(kept, sums.T, strict=True)
            ]
            if 1 < len(kept) <= MAX_COMPONENTS
            else [],
        }

    def _quantiles(self, counts: Array) -> dict[str, float]:
        cumulated = counts.cumsum()
        places = np.searchsorted(cumulated, _reached(_QUANTILES, cumulated[-1]))
        values = _middles(places, self._shift)
        return {f"{quantile:g}": float(value) for quantile, value in zip(_QUANTILES, values, strict=True)}

    def _histogram(self, all_counts: Array) -> dict[str, Any]:
        """Return bars of equal width; a fine bin belongs to the bar that holds its middle."""
        occupied = np.flatnonzero(all_counts)
        counts, middles = all_counts[occupied], _middles(occupied, self._shift)
        ends = np.searchsorted(counts.cumsum(), _reached(_DRAWN, counts.sum()))
        low, high = (float(middles[min(int(end), len(middles) - 1)]) for end in ends)
        margin = (high - low) / _BARS or max(abs(low), 1.0) / _BARS
        edges = np.linspace(low - margin / 2, high + margin / 2, _BARS + 1)
        places = np.searchsorted(edges, middles, side="right")
        bars = np.bincount(places, weights=counts, minlength=_BARS + 2)
        return {
            "edges": edges.tolist(),
            "counts": counted(bars[1:-1]),
            "below": counted(bars[0]),
            "above": counted(bars[-1]),
        }


def _reached(quantiles: Sequence[float], total: float) -> Array:
    """Return the cumulated weights at which quantiles are reached, with room for the rounding of sums."""
    return np.asarray(quantiles) * total * (1.0 - _SUM_ROUNDING)


def _bins(values: Array, shift: int) -> Array:
    """Return the bins of finite numbers: the leading bits of their float32s, in the order of the numbers."""
    limit = np.finfo(np.float32).max
    words = np.clip(values, -limit, limit).astype(np.float32).view(np.int32).astype(np.int64)
    ordered = np.where(words < 0, -_SIGN - words - 1, words)
    return np.asarray((ordered + _SIGN) >> shift)


def _middles(bins: Array, shift: int) -> Array:
    """Return the number in the middle of each bin; 0 for the bins that hold 0."""
    lowest = (bins.astype(np.int64) << shift) - _SIGN
    ends = np.stack([lowest, lowest + (1 << shift) - 1])
    words = np.where(ends < 0, -_SIGN - ends - 1, ends)
    low, high = words.astype(np.int32).view(np.float32).astype(np.float64)
    tiny = np.finfo(np.float32).tiny
    middles = (low + high) / 2
    return np.where(np.abs(middles) < tiny * 2 ** (shift - 20), 0.0, middles)


def _errors(sums: Array, items: float) -> dict[str, float | None]:
    """Return the mean, the mean absolute and the root mean square error."""
    if not items:
        return {"mean": None, "mean_absolute": None, "root_mean_square": None}
    return {
        "mean": float(sums[0] / items),
        "mean_absolute": float(sums[1] / items),
        "root_mean_square": float(np.sqrt(sums[2] / items)),
    }
