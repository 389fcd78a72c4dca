"""The differences of versions in every metric and slice, with intervals, corrected for how many are compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from understudy.evaluator.evaluation.breakdown import interval
from understudy.evaluator.types import Array, EvaluationResult


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

    It is below 1 minus the confidence where the percentile interval excludes 0. Where no resample is on the other side
    of 0, the normal distribution with the standard deviation of the resamples says how far below.
    """
    drawn = resampled[np.isfinite(resampled)]
    if not len(drawn) or not math.isfinite(value):
        return math.nan
    least = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    if least:
        return min(1.0, 2.0 * least / len(drawn))
    deviation = float(drawn.std())
    tail = math.erfc(abs(value) / deviation / math.sqrt(2.0)) if deviation else 0.0
    return min(tail, 1.0 / len(drawn))


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
