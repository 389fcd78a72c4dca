"""Losses that are one number for each batch, which is no sum over its examples.

Keras divides a loss by the number of elements that a mask keeps (``sum_over_batch_size`` with a mask), by the sum of
the weights (``mean_with_sample_weight``), or by nothing (``sum``). It takes the mean of these numbers over the batches,
each counted by its examples (the loss) or once (the losses of single outputs). The number of a part of a batch follows
from two sums over its examples: of their own losses times their own divisors, and of the divisors. Which of these forms
a loss has is not assumed: a form must give what the update added, on every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from understudy.evaluator.types import Array

ROUNDING = 1e-5
"""The allowed difference of a sum of increments, relative to the sum of the variable's largest increments."""

STATE_ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""The allowed difference relative to the state that they are added to."""


@dataclass(frozen=True)
class MeanForm:
    """One form of a loss.

    Attributes:
        total: The place of the loss's total in the state; that of the count follows.
        divisor: The index of the divisor; None for no division.
        by_examples: Whether a batch counts by its examples, or once.
    """

    total: int
    divisor: int | None
    by_examples: bool

    def added(self, increments: Array, divisors: Array, counts: Array) -> Array:
        """Return what some examples of one batch add to total and count, ``[ways, 2]``.

        Args:
            increments: What each example alone adds to the state, ``[examples, state]``.
            divisors: The divisors of each example, ``[examples, divisors]``.
            counts: How often to take each example, in several ways, ``[ways, examples]``.
        """
        losses, taken = increments[:, self.total], counts.sum(axis=1)
        if self.divisor is None:
            numbers = counts @ losses
        else:
            weights = divisors[:, self.divisor]
            whole = counts @ weights
            numbers = np.divide(counts @ (losses * weights), whole, out=np.zeros(len(counts)), where=whole != 0)
        times = taken if self.by_examples else (taken > 0).astype(np.float64)
        return np.stack([numbers * times, times], axis=1)

    def holds(self, increments: Array, divisors: Array, before: Array, after: Array) -> bool:
        """Return whether this form gives what the update with a batch added to the state, ``[state]`` each."""
        part = slice(self.total, self.total + 2)
        (found,) = self.added(increments, divisors, np.ones((1, len(increments))))
        (size,) = self.added(np.abs(increments), np.abs(divisors), np.ones((1, len(increments))))
        allowed = ROUNDING * size + STATE_ROUNDING * np.maximum(np.abs(before[part]), np.abs(after[part]))
        return not (np.abs(after[part] - before[part] - found) > allowed).any()


def possible_forms(totals: Iterable[int], divisors: int) -> Iterator[MeanForm]:
    """Yield the forms that losses may have, except for the sum over the examples.

    Args:
        totals: The places of the totals in the state.
        divisors: The number of divisors; the first is 1 for each example.
    """
    for total in totals:
        for divisor in (None, *range(divisors)):
            for by_examples in (True, False):
                if divisor != 0 or not by_examples:
                    yield MeanForm(total, divisor, by_examples)
