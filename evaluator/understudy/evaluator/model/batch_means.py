"""What the state of losses and metrics is made of: sums over the examples, and means of the losses of batches.

A loss may be one number for each batch, which is no sum over its examples. Keras divides a loss by the number of
elements that a mask keeps (``sum_over_batch_size`` with a mask), by the sum of the weights
(``mean_with_sample_weight``), or by nothing (``sum``). It takes the mean of these numbers over the batches, each
counted by its examples (the loss) or once (the losses of single outputs). The number of a part of a batch follows from
two sums over its examples: of their own losses times their own divisors, and of the divisors.

Which of these forms a loss has is not assumed: a form must give what the update added, on every batch. One may do so by
chance, as where the losses of all examples are nearly equal. Therefore some examples of a batch are drawn more often,
in an update of the first batch, and in others as long as several forms are left that differ by that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from understudy.evaluator.types import Array

ROUNDING = 1e-5
"""The allowed difference of a sum of increments, relative to the sum of the variable's largest increments."""

_APART = 2 * ROUNDING
_REDRAWS = 3

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

    @property
    def is_sum(self) -> bool:
        """Whether it is the sum over the examples, with their number as the count."""
        return self.divisor == 0 and self.by_examples

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
        with np.errstate(invalid="ignore"):  # infinite values
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
                form = MeanForm(total, divisor, by_examples)
                if not form.is_sum:
                    yield form


class Increments(Protocol):
    """The parts of `understudy.evaluator.model.increments.StateIncrements` that say what is a sum."""

    initial: Array

    @property
    def means(self) -> Mapping[int, int]:
        """The variables that are totals of means, each with its place in the state."""

    def sums(self, increments: Array, starts: Array, states: Array) -> tuple[bool, ...]:
        """Return for each variable whether the increments of every batch add up to what its update added."""

    def parts(self) -> Iterator[slice]:
        """Yield the place of each variable in the state."""


Update = Callable[[int, Array], Array]
"""Returns the state after an update of the initial one with some examples of a batch, by the index of the batch and the
indices of the examples in it. An example may be there more than once."""


class StateForms:
    """Finds out from updates which variables are sums over the examples, and which forms the losses have.

    Args:
        increments: Computes what examples add.

    Attributes:
        forms: The forms that all updates so far agree with.
    """

    def __init__(self, increments: Increments) -> None:
        self._increments = increments
        self._summed: tuple[bool, ...] = ()
        self._shown: set[int] = set()
        self._drawn = False
        self.forms: list[MeanForm] | None = None

    def stored(self) -> dict[str, Any]:
        """Return what was found, for `restore`: plain values."""
        return {
            "summed": list(self._summed),
            "shown": sorted(self._shown),
            "drawn": self._drawn,
            "forms": None if self.forms is None else [astuple(form) for form in self.forms],
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Go on from what `stored` returned."""
        self._summed, self._shown = tuple(stored["summed"]), set(stored.get("shown", ()))
        self._drawn = stored.get("drawn", False)
        self.forms = None if stored["forms"] is None else [MeanForm(*form) for form in stored["forms"]]

    def known_variables(self) -> set[int]:
        """Return the variables that are sums, or belong to a mean of a known form."""
        held = {index for index, is_sum in enumerate(self._summed) if is_sum}
        totals = {form.total for form in self.forms or ()}
        for variable, total in self._increments.means.items():
            if total in totals:
                held |= {variable, variable + 1}
        return held

    def of_means(self) -> dict[int, MeanForm]:
        """Return the forms of the losses that are no sums, by the places of their totals."""
        return {total: forms[0] for total, forms in self._possible().items() if forms and not forms[0].is_sum}

    def check(self, added: Array, divisors: Array, starts: Array, states: Array, update: Update) -> None:
        """Compare what updates added to the state with what their examples alone add.

        Args:
            added: What each example of some batches alone adds, ``[examples, state]``.
            divisors: Their divisors, ``[examples, divisors]``.
            starts: The index of the first example of each batch, and the number of examples.
            states: The state before the first batch and after each, ``[1 + batches, state]``.
            update: Makes further updates.
        """
        if self.forms is None:
            self.forms = list(possible_forms(self._increments.means.values(), divisors.shape[1]))
        held = self._increments.sums(added, starts[:-1], states)
        self._keep_sums(held)
        batches = [np.arange(start, end) for start, end in itertools.pairwise(starts)]
        for examples, before, after in zip(batches, states[:-1], states[1:], strict=True):
            if self.forms:
                self._keep_forms(added[examples], divisors[examples], before, after)

        def try_draw(batch: int, drawn: Array) -> None:
            initial = self._increments.initial
            after = update(batch, drawn - starts[batch])
            self._keep_sums(self._increments.sums(added[drawn], np.zeros(1, np.int64), np.stack([initial, after])))
            self._keep_forms(added[drawn], divisors[drawn], initial, after)

        for example in self._alone(added, starts, held):
            try_draw(int(np.searchsorted(starts, example, side="right")) - 1, np.full(2, example))
        for batch, examples in enumerate(batches):
            if self._drawn and not self._is_ambiguous():
                break
            for drawn in self._redraws(examples, divisors[examples]):
                if not self._drawn or self._disagree(added[drawn], divisors[drawn]):
                    try_draw(batch, drawn)
                    self._drawn = True

    def _keep_sums(self, held: Sequence[bool]) -> None:
        self._summed = tuple(one and other for one, other in zip(self._summed or held, held, strict=True))

    def _keep_forms(self, added: Array, divisors: Array, before: Array, after: Array) -> None:
        self.forms = [form for form in self.forms or () if form.holds(added, divisors, before, after)]

    def _alone(self, added: Array, starts: Array, held: Sequence[bool]) -> set[int]:
        """Return examples that alone added to variables of which no batch has shown yet that they are sums."""
        alone = set()
        for variable, part in enumerate(self._increments.parts()):
            if not held[variable] or variable in self._shown:
                continue
            adding = np.flatnonzero(added[:, part].any(axis=1))
            if (np.diff(np.searchsorted(starts, adding, side="right")) == 0).any():
                self._shown.add(variable)
            elif len(adding):
                alone.add(int(adding[0]))
        return alone

    def _redraws(self, examples: Array, divisors: Array) -> Iterator[Array]:
        """Yield the examples of a batch, some of them more often, while that may show what they do not."""
        for seed in range(_REDRAWS if len(examples) > 1 else 0):
            if self._drawn and not (self._is_ambiguous() and np.ptp(divisors, axis=0).any()):
                return
            yield np.repeat(examples, np.random.default_rng([len(examples), seed]).integers(1, 5, len(examples)))

    def _disagree(self, added: Array, divisors: Array) -> bool:
        """Return whether the forms of any loss give different numbers for these examples."""
        once = np.ones((1, len(added)))
        for forms in self._possible().values():
            numbers = np.concatenate([form.added(added, divisors, once) for form in forms] or [np.zeros((1, 2))])
            if (np.ptp(numbers, axis=0) > _APART * np.abs(numbers).max(axis=0)).any():
                return True
        return False

    def _is_ambiguous(self) -> bool:
        """Return whether a loss may have several forms."""
        return any(forms[1:] for forms in self._possible().values())

    def _possible(self) -> dict[int, list[MeanForm]]:
        """Return the forms that each loss may have, a sum first, by the places of their totals."""
        possible = {}
        for variable, total in self._increments.means.items():
            sums = [MeanForm(total, 0, True)] if all(self._summed[variable : variable + 2]) else []
            possible[total] = [*sums, *(form for form in self.forms or () if form.total == total)]
        return possible
