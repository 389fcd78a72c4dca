"""The scores of parts: of all examples and of slices, each as it is and in every resample.

A part's states are counted together, ``[1 + resamples]``: the first takes each example once, the others as often as it
is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from understudy.evaluator.evaluation.slices import Values, form_of
from understudy.evaluator.model.batch_means import MeanForm, StateForms
from understudy.evaluator.types import Array

if TYPE_CHECKING:
    from understudy.evaluator.model.increments import StateIncrements  # imports TensorFlow
    from understudy.evaluator.model.undefined_values import Undefined

MAX_UPDATES = 2000
"""The most updates that a batch takes for metrics that are updated with the examples of each part."""

_RESULTS_AT_ONCE = 2**20
_UPDATES_BETWEEN = 16

_PRODUCT_SIZE = 2**18
_LEAST_AT_ONCE = 64
"""Products of matrices up to this size are computed by one thread. OpenBLAS's other threads wait busily, and small
products beside a model take several times as long with them; large ones are worth it."""


class Part(NamedTuple):
    """All examples, with empty texts, or a slice of a setting."""

    setting: str
    name: str


WHOLE = Part("", "")


class Program(Protocol):
    """The parts of `understudy.evaluator.model.scoring_program.ScoringProgram` that score parts."""

    increments: StateIncrements | None
    without_increments: str
    runs_model: bool
    initial: Any

    def update_with(self, state: Any, data: Any, rows: Array) -> Any:
        """Return the state after some examples of a batch."""

    def result(self, state: Any) -> dict[str, float]:
        """Return the metrics at a state."""

    def undefined(self, states: Sequence[Any]) -> dict[str, Undefined]:
        """Return the metrics that are undefined at any of some states."""

    def counting(self, data: Any) -> Mapping[str, Array]:
        """Return for outputs which examples have any element that counts, bool ``[examples]``; others always have."""

    def undefined_losses(self, without: Mapping[str, Array]) -> dict[str, Undefined]:
        """Return the losses that are undefined, by the outputs of which nothing counts at some states."""


class Scored(Protocol):
    """A batch and the states before and after it; see `understudy.evaluator.model.scorer.ScoredBatch`."""

    @property
    def program(self) -> Program:
        """What scored it."""

    @property
    def data(self) -> Any:
        """Its examples."""

    @property
    def before(self) -> Any:
        """The state before it."""

    @property
    def after(self) -> Any:
        """The state after it."""


@dataclass(frozen=True, kw_only=True)
class WaitingBatch:
    """A batch that was scored, and is to be added to its parts.

    Attributes:
        scored: The batch.
        values: What its examples are sliced by.
        examples: The number of its examples.
        leaves: What the increments of its examples are computed from; empty if they have none.
    """

    scored: Scored
    values: Values
    examples: int
    leaves: Sequence[Any] = ()

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """What batches must have in common to be added together."""
        return form_of(self.values), *((leaf.dtype, leaf.shape[1:]) for leaf in self.leaves)


@dataclass(kw_only=True)
class PartMetrics:
    """The metrics of parts by name, and their values in the resamples, ``[resamples]`` each.

    Attributes:
        metrics: Those that are defined.
        undefined: Why the others are not.
        resampled: The values of those that are defined; NaN in resamples that draw no example, or where the metric is
            undefined.
        undefined_resamples: In how many of them it is.
        empty_resamples: How many resamples draw no example.
        losses: Where losses are undefined because nothing of an output counts.
    """

    metrics: dict[Part, dict[str, float]] = field(default_factory=dict)
    undefined: dict[Part, dict[str, str]] = field(default_factory=dict)
    resampled: dict[Part, dict[str, Array]] = field(default_factory=dict)
    undefined_resamples: dict[Part, dict[str, int]] = field(default_factory=dict)
    empty_resamples: dict[Part, int] = field(default_factory=dict)
    losses: dict[Part, Mapping[str, Undefined]] = field(default_factory=dict)

    def put(self, part: Part, values: Mapping[str, Array], drawn: Array, undefined: Mapping[str, Undefined]) -> None:
        """Add the metrics of a part.

        Args:
            part: The part.
            values: Each metric, ``[1 + resamples]``, by name.
            drawn: Whether each state has any example; the others have no value.
            undefined: The metrics that are undefined at any of these states.
        """
        places = {**undefined, **self.losses.get(part, {})}
        self.empty_resamples[part] = int((~drawn).sum())
        for name, each in values.items():
            found = places.get(name)
            reason = "" if found is None else found.reason()
            if reason:
                self.undefined.setdefault(part, {})[name] = reason
                continue
            self.metrics.setdefault(part, {})[name] = float(each[0])
            if len(drawn) > 1:
                lacks = np.zeros_like(drawn) if found is None else drawn & (found.places[: len(drawn)] > 0)
                self.resampled.setdefault(part, {})[name] = np.where(drawn & ~lacks, each, np.nan)[1:]
                self.undefined_resamples.setdefault(part, {})[name] = int(lacks.sum())


class PartSums:
    """The states of parts whose variables are sums over the examples, or means of the losses of batches.

    Args:
        increments: Computes what examples add.
        resamples: The number of resamples.
    """

    def __init__(self, increments: StateIncrements, resamples: int) -> None:
        self._increments = increments
        self._resamples = resamples
        self._found = StateForms(increments)
        self._states: dict[Part, _States] = {}

    def add(self, batches: Sequence[WaitingBatch], parts: Sequence[tuple[Part, Array]], draws: Array) -> None:
        """Add batches of one form.

        Args:
            batches: The batches.
            parts: The slices of the examples of all of them together, each with the indices of its examples, ascending.
            draws: How often to take each of their examples, float64 ``[1 + resamples, examples]``.
        """
        added, divisors = self._increments([each.leaves for each in batches])
        starts = np.cumsum([0, *(each.examples for each in batches)])
        flat = self._increments.flat
        states = flat([batches[0].scored.before.metrics, *(each.scored.after.metrics for each in batches)])

        def update(batch: int, rows: Array) -> Array:
            program, data = batches[batch].scored.program, batches[batch].scored.data
            (state,) = flat([program.update_with(program.initial, data, rows).metrics])
            return np.asarray(state)

        self._found.check(added, divisors, starts, states, update)
        self._of(WHOLE).add(added, draws)
        for part, rows in parts:
            self._of(part).add(added[rows], _taken(draws, rows))
        everything = ((WHOLE, np.arange(len(added))), *parts)
        if divisors.shape[1] > 1:
            for part, rows in everything:
                self._of(part).add_weights(divisors[rows, 1:], _taken(draws, rows))
        if not self._found.forms:
            return
        for part, rows in everything:
            for _, of_batch in _by_batch(rows, starts):
                own = added[of_batch], divisors[of_batch], _taken(draws, of_batch)
                self._of(part).add_means(self._found.forms, *own)

    def stored(self) -> dict[str, Any]:
        """Return the states, for `restore`: plain values and arrays."""
        return {
            **self._found.stored(),
            "states": [[*part, states.stored()] for part, states in self._states.items()],
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Go on from what `stored` returned."""
        self._found.restore(stored)
        for setting, name, states in stored["states"]:
            self._of(Part(setting, name)).restore(states)

    def unusable(self) -> list[str]:
        """Return the metrics that depend on a variable which is neither a sum nor a mean."""
        held = self._found.known_variables()
        return sorted(name for name, needed in self._increments.needs.items() if not needed <= held)

    def forget(self, setting: str) -> None:
        """Forget the slices of a setting."""
        self._states = {part: states for part, states in self._states.items() if part.setting != setting}

    def forget_resamples(self) -> None:
        """Forget the resamples."""
        self._resamples = 0
        for states in self._states.values():
            states.keep_first()

    def put_into(self, found: PartMetrics) -> None:
        """Add the metrics of all parts, except those that are unusable."""
        unusable = set(self.unusable())
        replaced = self._found.of_means()
        size = (1 + self._resamples) * len(self._increments.initial)
        at_once = max(1, _RESULTS_AT_ONCE // max(1, size))
        parts = list(self._states.items())
        for start in range(0, len(parts), at_once):
            some = parts[start : start + at_once]
            vectors = np.concatenate([self._increments.initial + states.with_means(replaced) for _, states in some])
            values = self._increments.results(vectors)
            undefined = self._increments.undefined(vectors)
            usable = {name: each for name, each in values.items() if not _is_of(name, unusable)}
            for index, (part, states) in enumerate(some):
                rows = slice(index * (1 + self._resamples), (index + 1) * (1 + self._resamples))
                found.losses[part] = self._increments.undefined_losses(states.weights)
                found.put(
                    part,
                    {name: each[rows] for name, each in usable.items()},
                    states.counts > 0,
                    {name: each.of(rows) for name, each in undefined.items()},
                )

    def _of(self, part: Part) -> _States:
        if part not in self._states:
            self._states[part] = _States(1 + self._resamples, len(self._increments.initial))
        return self._states[part]


class _States:
    """The states of one part: sums of increments, and sums of the means of batches by their form."""

    def __init__(self, ways: int, state: int) -> None:
        self.counts = np.zeros(ways)
        self._sums = np.zeros((ways, state))
        self._means: dict[MeanForm, Array] = {}
        self.weights = np.zeros((ways, 0))

    def add_weights(self, weights: Array, draws: Array) -> None:
        """Add the weights of examples by output, and how many of their elements masks keep, ``[examples, ...]``."""
        added = draws @ np.abs(weights)
        self.weights = self.weights + added if self.weights.size else added

    def add(self, increments: Array, draws: Array) -> None:
        self.counts += draws.sum(axis=1)
        at_once = _PRODUCT_SIZE // self._sums.size
        at_once = at_once if at_once >= _LEAST_AT_ONCE else max(1, len(increments))
        with np.errstate(invalid="ignore"):  # infinite values, also where they are not drawn
            for start in range(0, len(increments), at_once):
                self._sums += draws[:, start : start + at_once] @ increments[start : start + at_once]

    def add_means(self, forms: Sequence[MeanForm], increments: Array, divisors: Array, draws: Array) -> None:
        for form in forms:
            found = self._means.setdefault(form, np.zeros((len(self.counts), 2)))
            with np.errstate(invalid="ignore"):
                found += form.added(increments, divisors, draws)

    def with_means(self, forms: Mapping[int, MeanForm]) -> Array:
        """Return the sums, with the totals and counts of these forms in their places, ``[ways, state]``."""
        states = self._sums.copy() if forms else self._sums
        for total, form in forms.items():
            states[:, total : total + 2] = self._means[form]
        return states

    def stored(self) -> dict[str, Any]:
        means = [[astuple(form), array] for form, array in self._means.items()]
        return {"counts": self.counts, "sums": self._sums, "means": means, "weights": self.weights}

    def restore(self, stored: Mapping[str, Any]) -> None:
        self.counts, self._sums = stored["counts"], stored["sums"]
        self._means = {MeanForm(*form): array for form, array in stored["means"]}
        self.weights = stored["weights"]

    def keep_first(self) -> None:
        self.counts, self._sums, self.weights = self.counts[:1], self._sums[:1], self.weights[:1]
        self._means = {form: means[:1] for form, means in self._means.items()}


class PartUpdates:
    """The states of parts, each updated with its examples of every batch: for metrics of any kind.

    An update takes about as long as that of a whole batch. Resamples are therefore limited to `MAX_UPDATES` updates for
    a batch, and left out for models whose own code runs in the update, with a note.

    Args:
        program: Scores batches.
        resamples: The number of resamples.
        between_pieces: Called between updates.

    Attributes:
        notes: What was left out, and why.
    """

    def __init__(self, program: Program, resamples: int, between_pieces: Callable[[], None]) -> None:
        self._program = program
        self._between_pieces = between_pieces
        self._updates = 0
        self._states: dict[Part, list[Any]] = {}
        self._counting: dict[Part, dict[str, bool]] = {}
        self._resamples = resamples
        self._slice_resamples = resamples
        self.notes: list[str] = []
        if resamples and program.increments is None:
            self.forget_resamples()
            self.notes.append(f"there are no intervals, because {program.without_increments}")
        elif resamples and program.runs_model:
            self._forget_resamples("the model itself would have to run for each of them")

    def add(self, batches: Sequence[WaitingBatch], parts: Sequence[tuple[Part, Array]], draws: Array) -> None:
        """Update the parts with their examples of each batch; see `PartSums.add`."""
        starts = np.cumsum([0, *(batch.examples for batch in batches)])[:-1]
        own: list[list[tuple[Part, Array]]] = [[] for _ in batches]
        for part, rows in parts:
            for index, of_batch in _by_batch(rows, starts):
                own[index].append((part, of_batch - starts[index]))
        for batch, parts_of_batch, start in zip(batches, own, starts, strict=True):
            self._add(batch, parts_of_batch, draws[:, start : start + batch.examples])

    def _add(self, batch: WaitingBatch, parts: Sequence[tuple[Part, Array]], draws: Array) -> None:
        self._limit(len(self._states.keys() | {part for part, _ in parts} | {WHOLE}))
        if self._resamples:
            self._update(WHOLE, batch, np.arange(batch.examples), draws[: 1 + self._resamples])
        for part, rows in parts:
            self._update(part, batch, rows, draws[: 1 + self._slice_resamples, rows])
        if self._program.increments is None:  # which would tell where nothing counts; nor are there resamples
            self._count(self._program.counting(batch.scored.data), parts)

    def forget(self, setting: str) -> None:
        """Forget the slices of a setting."""
        self._states = {part: states for part, states in self._states.items() if part.setting != setting}
        self._counting = {part: counting for part, counting in self._counting.items() if part.setting != setting}

    def forget_resamples(self) -> None:
        """Forget the resamples."""
        self._resamples = self._slice_resamples = 0

    def stored(self) -> dict[str, Any]:
        """Return the states, for `restore`: plain values and arrays."""
        return {
            "resamples": self._resamples,
            "slice_resamples": self._slice_resamples,
            "notes": self.notes,
            "states": [
                [*part, [None if state is None else state.stored() for state in states]]
                for part, states in self._states.items()
            ],
            "counting": [[*part, counting] for part, counting in self._counting.items()],
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Go on from what `stored` returned."""
        self._resamples, self._slice_resamples = stored["resamples"], stored["slice_resamples"]
        self.notes = list(stored["notes"])
        restored = type(self._program.initial).restored
        for setting, name, states in stored["states"]:
            part = Part(setting, name)
            self._states[part] = [None if state is None else restored(state) for state in states]
        self._counting = {Part(setting, name): dict(counting) for setting, name, counting in stored["counting"]}

    def put_into(self, found: PartMetrics, names: Collection[str] | None) -> None:
        """Add these metrics of all parts; all metrics if None."""
        for part, states in self._states.items():
            kept = states[: 1 + (self._slice_resamples if part.name else self._resamples)]
            drawn = np.array([state is not None for state in kept])
            reached = [self._program.initial if state is None else state for state in kept]
            values = self._results(reached)
            if part in self._counting:
                without = {name: np.array([not counts]) for name, counts in self._counting[part].items()}
                found.losses[part] = self._program.undefined_losses(without)
            if values:
                wanted = {name: each for name, each in values.items() if names is None or _is_of(name, names)}
                found.put(part, wanted, drawn, self._program.undefined(reached))

    def _update(self, part: Part, batch: WaitingBatch, rows: Array, draws: Array) -> None:
        states = self._states.setdefault(part, [None] * len(draws))
        for way, counts in enumerate(draws.astype(np.int64)):
            chosen = np.repeat(rows, counts)
            if len(chosen):
                state = self._program.initial if states[way] is None else states[way]
                states[way] = self._program.update_with(state, batch.scored.data, chosen)
                self._updates += 1
                if self._updates % _UPDATES_BETWEEN == 0:
                    self._between_pieces()

    def _count(self, counting: Mapping[str, Array], parts: Sequence[tuple[Part, Array]]) -> None:
        """Note of which outputs the parts have elements that count, from whether each example of a batch has."""
        for part, rows in parts:
            of_part = self._counting.setdefault(part, {})
            for output, counts in counting.items():
                of_part[output] = of_part.get(output, False) or bool(counts[rows].any())

    def _limit(self, parts: int) -> None:
        if self._slice_resamples and parts * (1 + self._slice_resamples) > MAX_UPDATES:
            self._slice_resamples = 0
            self.notes.append(
                f"slices have no intervals of metrics that are updated for each resample: {parts} parts with "
                f"{self._resamples} resamples take more than {MAX_UPDATES} updates for a batch"
            )
        if self._resamples and parts + self._resamples > MAX_UPDATES:
            self._forget_resamples(f"{self._resamples} resamples take more than {MAX_UPDATES} updates for a batch")

    def _forget_resamples(self, reason: str) -> None:
        self.forget_resamples()
        self.notes.append(f"metrics that are updated for each part have no intervals, because {reason}")

    def _results(self, states: Sequence[Any]) -> dict[str, Array]:
        increments = self._program.increments
        if increments is not None:
            return increments.results(increments.flat([state.metrics for state in states]))
        found = [self._program.result(state) for state in states]
        return {name: np.array([each[name] for each in found]) for name in found[0]}


def _by_batch(rows: Array, starts: Array) -> Iterator[tuple[int, Array]]:
    """Yield the batches that have any of these rows, ascending, each with its own.

    Args:
        rows: Indices of examples of several batches together, ascending; at least one.
        starts: The index of the first example of each batch.
    """
    batches = np.searchsorted(starts, rows, side="right") - 1
    firsts = np.flatnonzero(np.diff(batches, prepend=-1))
    yield from zip(batches[firsts].tolist(), np.split(rows, firsts[1:]), strict=True)


def _taken(draws: Array, rows: Array) -> Array:
    """Return the draws of some examples, ``[ways, examples]``; they are stored by example, so rows are copied whole."""
    return draws.T[rows].T


def _is_of(name: str, metrics: Collection[str]) -> bool:
    """Return whether a value is one of these metrics, or one of the several values of one, as ``metric/0``."""
    return name in metrics or name.rpartition("/")[0] in metrics
