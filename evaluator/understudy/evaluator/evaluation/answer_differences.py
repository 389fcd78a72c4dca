"""How the answers of two versions to the same inputs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from understudy.evaluator.evaluation.class_decisions import decided, task_by_values
from understudy.evaluator.types import Array, Arrays, OutputTask

_FLOATS: Final = "fV"
"""The kinds of dtypes of floating-point numbers; bfloat16 and others have none of NumPy's own."""


class AnswerDifference(NamedTuple):
    """How an answer differs from another version's.

    Attributes:
        share: The share of its examples that differ: in a class or label, or by more than the tolerance.
        largest: The largest difference of two numbers, relative to the largest number of that output; 0 if all outputs
            have classes.
        is_finite: Whether all numbers are finite that are finite in the other answer.
    """

    share: float
    largest: float
    is_finite: bool


def compare_answers(
    tasks: Mapping[str, OutputTask], now: Arrays, before: Arrays, *, tolerance: float
) -> AnswerDifference:
    """Compare all outputs ``[examples, ...]`` of an answer with another version's.

    Args:
        tasks: The task of each output, by its name. Outputs of classifiers differ if a class or label does.
        now: The answer.
        before: The other version's, with at least one example.
        tolerance: By how much other numbers may differ, relative to the largest number of the output.
    """
    examples = len(next(iter(before.values())))
    differs = np.full(examples, now.keys() != before.keys())
    largest, is_finite = 0.0, True
    for name in now.keys() & before.keys():
        a, b = now[name], before[name]
        if a.shape != b.shape or (a.dtype.kind in _FLOATS) != (b.dtype.kind in _FLOATS):
            differs[:] = True
            continue
        if a.dtype.kind not in _FLOATS:
            differs |= _any(a != b)
            continue
        is_finite &= bool((np.isfinite(_numbers(a)) | ~np.isfinite(_numbers(b))).all())
        flipped = flips(tasks.get(name), a, b)
        if flipped is None:
            gaps = _gaps(_numbers(a), _numbers(b))
            largest = max(largest, float(gaps.max()))
            flipped = gaps > tolerance
        differs |= flipped
    return AnswerDifference(share=float(differs.mean()), largest=largest, is_finite=is_finite)


def flips(task: OutputTask | None, now: Array, before: Array) -> Array | None:
    """Return which examples are decided otherwise, bool ``[examples]``; None for an output without decisions.

    Args:
        task: The task of the output; None if it is not known. The values of both tell an unknown one.
        now: Its values ``[examples, ...]``.
        before: The other version's, of the same shape.
    """
    task = task_by_values(task, np.concatenate([now, before]))
    first, second = decided(task, now), decided(task, before)
    return None if first is None or second is None else _any(first != second)


def _gaps(now: Array, before: Array) -> Array:
    """Return the largest difference of each example relative to the largest number of all, float64 ``[examples]``."""
    finite = np.where(np.isfinite(before), np.abs(before), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(now - before)
        apart = np.where((now == before) | (np.isnan(now) & np.isnan(before)), 0.0, np.nan_to_num(apart, nan=np.inf))
        relative = np.where(apart == 0, 0.0, apart / finite.max())
    return np.asarray(relative.reshape(len(now), -1).max(axis=1, initial=0.0))


def _any(differs: Array) -> Array:
    return np.asarray(np.asarray(differs).reshape(len(differs), -1).any(axis=1))


def _numbers(array: Array) -> Array:
    numbers: Any = array.astype(np.float64)
    return np.asarray(numbers)
