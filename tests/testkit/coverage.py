"""How often the intervals of an evaluation contain the truth, in simulated evaluations."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from understudy.evaluator.evaluation.breakdown import Breakdown, BreakdownOptions
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.types import Batch, OutputTask

EXAMPLES = 500
RARE = 0.1
"""The share of the examples in the rare slice."""

_BINS = 100
_POPULATION = 400_000


class Sums:
    """The part of `StateIncrements` that a breakdown uses, for metrics in NumPy.

    The state holds the number of examples, the right ones, the true and false positives and the false negatives, the
    squared errors, and the scores of positives and of negatives in bins.
    """

    initial = np.zeros(6 + 2 * _BINS)
    needs: ClassVar = {name: frozenset({0}) for name in ("accuracy", "f1", "rmse", "auc")}
    means: ClassVar[dict[int, int]] = {}

    def parts(self) -> Any:
        yield slice(0, len(self.initial))

    def leaves(self, arguments: Any) -> Any:
        return [tf.constant(*arguments)]

    def __call__(self, batches: Any) -> Any:
        found = np.concatenate([np.asarray(leaf) for (leaf,) in batches])
        return found, np.ones((len(found), 1))

    def sums(self, increments: Any, starts: Any, states: Any) -> tuple[bool, ...]:
        del increments, starts, states
        return (True,)

    def flat(self, states: Any) -> Any:
        return np.stack(states)

    def undefined(self, states: Any) -> dict[str, Any]:
        del states
        return {}

    def undefined_losses(self, weights: Any) -> dict[str, Any]:
        del weights
        return {}

    def results(self, states: Any) -> dict[str, Any]:
        count, right, hits, alarms, misses, squares = states[:, :6].T
        positives, negatives = states[:, 6 : 6 + _BINS], states[:, 6 + _BINS :]
        below = np.cumsum(negatives, axis=1) - negatives / 2
        pairs = positives.sum(axis=1) * negatives.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "accuracy": right / count,
                "f1": 2 * hits / (2 * hits + alarms + misses),
                "rmse": np.sqrt(squares / count),
                "auc": (positives * below).sum(axis=1) / pairs,
            }


def scored(increments: Any) -> Any:
    """Return a scored batch whose examples have these increments."""
    state = SimpleNamespace(metrics=Sums.initial)
    data = SimpleNamespace(as_arguments=lambda: (increments,), bytes=increments.nbytes)

    def update_with(before: Any, _data: Any, rows: Any) -> Any:
        return SimpleNamespace(metrics=before.metrics + increments[rows].sum(axis=0))

    program = SimpleNamespace(increments=Sums(), runs_model=False, initial=state, update_with=update_with)
    return SimpleNamespace(program=program, data=data, before=state, after=state)


def draw_increments(rng: np.random.Generator, examples: int) -> tuple[Any, Any]:
    """Return what some examples add to the state, and which are in the rare slice, whose scores say less."""
    positive, rare = rng.random(examples) < 0.4, rng.random(examples) < RARE
    scores = 1 / (1 + np.exp(-rng.normal(np.where(positive, 1.0, -1.0) * np.where(rare, 0.5, 1.0), 1.3)))
    called = scores > 0.5
    columns = [np.ones(examples), called == positive, called & positive, called & ~positive, ~called & positive]
    bins = np.eye(_BINS)[np.minimum((scores * _BINS).astype(int), _BINS - 1)]
    sums = np.stack([*columns, rng.normal(size=examples) ** 2], axis=1)
    return np.hstack([sums, bins * positive[:, None], bins * ~positive[:, None]]), rare


def truth() -> dict[str, float]:
    """Return the metrics of a large population, and the accuracy of its rare slice."""
    rng, parts, of_rare = np.random.default_rng(0), Sums.initial.copy(), Sums.initial.copy()
    for _ in range(_POPULATION // 20_000):
        increments, rare = draw_increments(rng, 20_000)
        parts += increments.sum(axis=0)
        of_rare += increments[rare].sum(axis=0)
    whole, slice_ = (Sums().results(state[None]) for state in (parts, of_rare))
    return {name: float(values[0]) for name, values in whole.items()} | {"rare slice": float(slice_["accuracy"][0])}


def count_covered(seed: int, draws: int, *, resamples: int = 400) -> Counter[str]:
    """Return in how many of so many simulated evaluations each 95 % interval contains the truth."""
    expected, covered = truth(), Counter[str]()
    for number in range(draws):
        increments, rare = draw_increments(np.random.default_rng([seed, number]), EXAMPLES)
        options = BreakdownOptions(slices=parse_slices(["rare"]), resamples=resamples, seed=seed * draws + number)
        breakdown = Breakdown(options, {"y": OutputTask(kind="binary")})
        batch = Batch(inputs={"x": np.zeros(EXAMPLES)}, targets={"y": np.zeros(EXAMPLES)}, features={"rare": rare})
        breakdown.add(batch, scored(increments), {})
        found = breakdown.finish()
        intervals = dict(found.intervals)
        (part,) = (part for part in found.slices if part.name == "rare=True")
        intervals["rare slice"] = part.intervals["accuracy"]
        covered.update(name for name, bounds in intervals.items() if bounds.low <= expected[name] <= bounds.high)
    return covered
