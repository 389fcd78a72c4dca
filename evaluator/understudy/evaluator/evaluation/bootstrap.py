"""The Poisson bootstrap: draws, intervals, and the differences of versions, corrected for how many are compared.

Resampling n examples with replacement draws each example a number of times that is Poisson(1) distributed, except for
the constraint that the numbers add up to n. Without the constraint the numbers are independent, so that each example
can be weighted as it arrives (Hanley and MacGibbon, "Creating non-parametric bootstrap samples using Poisson
frequencies", 2006; Chamandy et al., "Estimating uncertainty for massive data streams", 2012).

A draw is a function of the seed, the number of the resample and the place of the example in its dataset, computed by a
counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). It depends neither on the
sizes of the batches nor on what is scored, so that all versions, metrics and slices are resampled alike, on whatever
day they are scored.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from understudy.evaluator.types import Array, EvaluationResult, Interval, SliceScore

_DRAWS_OF_COUNTER = 16
"""One value of the counter gives 256 random bits: 16 bits for the draw of each of 16 resamples."""

_CHOICES = 2**16

_NAMED_SLICES = 10


def _table() -> Array:
    """Return the draw for each number of 16 bits, the inverse of Poisson(1)'s distribution function."""
    chances = [math.exp(-1) / math.factorial(draws) for draws in range(12)]
    limits = np.round(np.cumsum(chances) * _CHOICES)
    return np.searchsorted(limits, np.arange(_CHOICES), side="right").astype(np.uint8)


_TABLE = _table()


def draw(seed: int, resamples: int, first: int, examples: int) -> Array:
    """Return how often each example is drawn in each resample, uint8 ``[resamples, examples]``.

    Args:
        seed: The seed, at least 0.
        resamples: The number of resamples.
        first: The place of the first example in its dataset, from 0.
        examples: The number of examples.
    """
    blocks = [np.zeros((examples, 0), np.uint8)]
    for block in range(-(-resamples // _DRAWS_OF_COUNTER)):
        generator = np.random.Philox(key=[seed, block], counter=first)
        bits = generator.random_raw(4 * examples).astype("<u8", copy=False)
        blocks.append(_TABLE[bits.view("<u2")].reshape(examples, _DRAWS_OF_COUNTER))
    return np.concatenate(blocks, axis=1)[:, :resamples].T


def interval(values: Array, confidence: float) -> Interval:
    """Return the percentile interval of a metric's values in the resamples; those that are NaN do not count."""
    tail = (1.0 - confidence) / 2.0
    known = values[~np.isnan(values)]
    if not len(known):
        return Interval(low=math.nan, high=math.nan)
    with np.errstate(invalid="ignore"):  # between infinite values
        low, high = np.quantile(known, [tail, 1.0 - tail])
    return Interval(low=float(low), high=float(high))


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """A version's metric minus the first version's.

    ``low`` and ``high`` bound the percentile interval of the paired bootstrap. ``p_value`` is the probability of a
    difference at least this large by chance, corrected by Holm's method. All but ``value`` are NaN if no resample has
    a value.
    """

    value: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True, kw_only=True)
class SliceDifference:
    """The differences of the metrics of one slice, by name."""

    name: str
    examples: int
    differences: Mapping[str, MetricDifference]


def configured_otherwise(first: EvaluationResult, second: EvaluationResult) -> frozenset[str]:
    """Return the names of the metrics that two versions have in different configurations, so they do not compare."""
    both = first.metric_digests.keys() & second.metric_digests.keys()
    return frozenset(name for name in both if first.metric_digests[name] != second.metric_digests[name])


class Sliced(Protocol):
    """A score with slices: `EvaluationResult` or an entry of the ledger."""

    @property
    def step(self) -> int:
        """The step that was scored."""

    @property
    def slices(self) -> Sequence[SliceScore]:
        """Its slices."""


def lacking_slices(first: Sliced, second: Sliced) -> list[str]:
    """Return a sentence about the slices that only one of two scores has, for each of them."""
    notes = []
    for having, lacking in ((first, second), (second, first)):
        there = {part.name for part in lacking.slices}
        names = [part.name for part in having.slices if part.name not in there]
        if names:
            more = f" and {len(names) - _NAMED_SLICES} more" if len(names) > _NAMED_SLICES else ""
            shown = ", ".join(names[:_NAMED_SLICES])
            notes.append(f"only step {having.step} has these slices, so they are not compared: {shown}{more}")
    return notes


def metric_differences(
    first: EvaluationResult, others: Sequence[EvaluationResult], *, confidence: float
) -> list[dict[str, MetricDifference]]:
    """Return the differences of each version's metrics; each metric is corrected for the number of versions."""
    found = [_differences("", of, first, of.metrics, first.metrics, confidence=confidence) for of in others]
    return _corrected(found)


def slice_differences(
    first: EvaluationResult, others: Sequence[EvaluationResult], *, confidence: float
) -> list[list[SliceDifference]]:
    """Return the differences of each version's slices; each metric is corrected for versions times slices."""
    base = {part.name: part for part in first.slices}
    parts = [(index, part) for index, of in enumerate(others) for part in of.slices if part.name in base]
    found = _corrected(
        [
            _differences(
                f"[{part.name}]",
                others[index],
                first,
                part.metrics,
                base[part.name].metrics,
                confidence=confidence,
            )
            for index, part in parts
        ]
    )
    result: list[list[SliceDifference]] = [[] for _ in others]
    for (index, part), differences in zip(parts, found, strict=True):
        result[index].append(SliceDifference(name=part.name, examples=part.examples, differences=differences))
    return result


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number; NaN stays NaN and does not count.

    S. Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    order = sorted((index for index, value in enumerate(p_values) if not math.isnan(value)), key=p_values.__getitem__)
    corrected, largest = list(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(order) - rank)))
        corrected[index] = largest
    return corrected


def p_value(value: float, resampled: Array) -> float:
    """Return the two-sided p-value of a difference.

    It is below 1 minus the confidence where the percentile interval excludes 0, whatever the values are that are not
    finite: those count as on the other side of 0. Where no resample is there, the normal distribution with the standard
    deviation of the resamples says how far below, and without any deviation the number of resamples. It is never 0.
    """
    drawn = resampled[np.isfinite(resampled)]
    if not len(drawn) or not math.isfinite(value):
        return math.nan
    least = min(int((drawn <= 0).sum()), int((drawn >= 0).sum())) + len(resampled) - len(drawn)
    if least:
        return min(1.0, 2.0 * least / len(resampled))
    deviation = float(drawn.std())
    tail = math.erfc(abs(value) / deviation / math.sqrt(2.0)) if deviation else 1.0
    return max(sys.float_info.min, min(tail, 1.0 / len(drawn)))


def _differences(
    part: str,
    version: EvaluationResult,
    first: EvaluationResult,
    metrics: Mapping[str, float],
    base: Mapping[str, float],
    *,
    confidence: float,
) -> dict[str, MetricDifference]:
    found = {}
    for name in (metrics.keys() & base.keys()) - configured_otherwise(first, version):
        key = f"{name}{part}"
        if key not in version.resampled or key not in first.resampled:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # infinity minus infinity
            apart = version.resampled[key].astype(np.float64) - first.resampled[key]
        value = metrics[name] - base[name]
        bounds = interval(apart, confidence)
        found[name] = MetricDifference(value=value, low=bounds.low, high=bounds.high, p_value=p_value(value, apart))
    return dict(sorted(found.items()))


def _corrected(found: Sequence[dict[str, MetricDifference]]) -> list[dict[str, MetricDifference]]:
    """Correct the p-values of each metric for the number of its differences."""
    result = [dict(differences) for differences in found]
    for name in {name for differences in found for name in differences}:
        places = [index for index, differences in enumerate(found) if name in differences]
        values = holm([found[index][name].p_value for index in places])
        for index, value in zip(places, values, strict=True):
            result[index][name] = replace(found[index][name], p_value=value)
    return result
