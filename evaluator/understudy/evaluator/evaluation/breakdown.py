"""The metrics of slices and of resamples, from what each example adds to the state of the metrics."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.evaluator.evaluation.bootstrap import draw, interval
from understudy.evaluator.evaluation.class_decisions import predicted_classes
from understudy.evaluator.evaluation.part_scores import (
    WHOLE,
    Part,
    PartMetrics,
    PartSums,
    PartUpdates,
    Program,
    Scored,
    WaitingBatch,
)
from understudy.evaluator.evaluation.resample_memory import MAX_MEMORY, ResampleMemory
from understudy.evaluator.evaluation.slices import (
    MAX_SLICES,
    Members,
    QuantileSample,
    SliceError,
    Slicer,
    SliceSetting,
    Values,
    joined,
    number_values,
    resolved,
)
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.inputs import by_output
from understudy.evaluator.types import Array, Arrays, Batch, Interval, OutputTask, SliceScore

if TYPE_CHECKING:
    from understudy.evaluator.model.increments import StateIncrements  # imports TensorFlow

MAX_RESAMPLES = 10_000

SEED = 0
"""The seed of the draws of recorded evaluations, so that any two of them on the same examples are paired."""

_NUMBER_BYTES = 8

_FEW_RESAMPLES = 0.01
"""A metric may have no value in this share of the resamples before a note says so."""

_WAITING_EXAMPLES = 2**14
_WAITING_BYTES = 32 * 2**20
_WAITING_DRAWS = 2**21
_WAITING_INCREMENTS = 2**20
"""Batches are added together up to these numbers: examples, bytes, draws and increments of all examples."""


@dataclass(frozen=True, kw_only=True)
class BreakdownOptions:
    """What to compute besides the metrics of all examples.

    Attributes:
        slices: The slices.
        slice_min_examples: Slices with fewer examples have no metrics.
        resamples: How many times to resample the examples for the intervals, 0 to `MAX_RESAMPLES`.
        confidence: The confidence level of the intervals, between 0 and 1.
        seed: The seed of the draws.
        lenient: Whether slices by features that do not exist are left out with a note, instead of refused.

    Raises:
        InvalidInputError: A value is out of its range.
    """

    slices: tuple[SliceSetting, ...] = ()
    slice_min_examples: int = 1
    resamples: int = 0
    confidence: float = 0.95
    seed: int = SEED
    lenient: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.resamples <= MAX_RESAMPLES:
            raise InvalidInputError(f"{self.resamples} resamples were requested; give 0 to {MAX_RESAMPLES}")
        if not 0 < self.confidence < 1:
            raise InvalidInputError(f"the confidence is {self.confidence}; give a number between 0 and 1, such as 0.95")
        if self.slice_min_examples < 1:
            raise InvalidInputError(f"slice_min_examples is {self.slice_min_examples}; give at least 1")
        if self.seed < 0:
            raise InvalidInputError(f"the seed is {self.seed}; give a number from 0 up")

    @property
    def needs_predictions(self) -> bool:
        """Whether a slice is by the predicted class."""
        return any(feature.is_prediction for setting in self.slices for feature in setting.features)

    def digest(self, metric_digest: str) -> str:
        """Return a SHA-256 that identifies a way of scoring: with these options, and metrics of this digest."""
        texts = (setting.text for setting in self.slices)
        fields = (metric_digest, *texts, self.slice_min_examples, self.resamples, self.confidence, self.seed)
        return hashlib.sha256(repr(fields).encode()).hexdigest()

    def with_quantiles_of(
        self, read: Callable[[], Iterable[Batch]], tasks: Mapping[str, OutputTask]
    ) -> BreakdownOptions:
        """Return options whose quantiles are edges, found in one pass over the data, if any quantile is requested.

        Args:
            read: Returns the batches from the beginning.
            tasks: What each output of the model is for, by its name, in the model's order.

        Raises:
            SliceError: A feature does not exist, or has no single number for each example, and the options are not
                lenient.
        """
        wanted = {feature.name: feature for setting in self.slices for feature in setting.features if feature.quantiles}
        if not wanted:
            return self
        samples = {name: QuantileSample() for name in wanted}
        for batch in read():
            targets, columns = by_output(batch, list(tasks)), {**batch.inputs, **batch.features}
            for name, sample in samples.items():
                try:
                    sample.add(number_values(wanted[name], targets, columns, tasks))
                except SliceError:
                    if not self.lenient:
                        raise
        return replace(self, slices=resolved(self.slices, samples))

    @property
    def has_quantiles(self) -> bool:
        """Whether a slice is by quantiles, which have to be found first."""
        return any(feature.quantiles for setting in self.slices for feature in setting.features)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.slices or self.resamples)


@dataclass(frozen=True, kw_only=True)
class BrokenDown:
    """The result of a breakdown; see `understudy.evaluator.types.EvaluationResult`."""

    intervals: Mapping[str, Interval] = field(default_factory=dict)
    slices: tuple[SliceScore, ...] = ()
    resampled: Arrays = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Breakdown:
    """Scores slices and resamples. For one thread.

    Most metrics are sums of what their examples add, and losses are means of those of batches; both are computed for
    many batches at once. The others are updated with the examples of each slice and resample. Its memory depends on the
    state of the metrics, the slices and the resamples, not on the examples.

    Args:
        options: What to compute.
        tasks: What each output of the model is for, by its name, in the model's order.
        memory: Bounds the memory of the resamples with those of others; None if it is bounded alone.
        between_pieces: Called between the pieces of a large batch.
    """

    def __init__(
        self,
        options: BreakdownOptions,
        tasks: Mapping[str, OutputTask],
        *,
        memory: ResampleMemory | None = None,
        between_pieces: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks = tasks
        self._options = options
        self._between_pieces = between_pieces
        self._memory = memory or ResampleMemory()
        self._holding = threading.Lock()
        self._held = 0
        self._is_released = False
        self._slicer = Slicer(settings=options.slices, tasks=tasks, lenient=options.lenient)
        self._resamples = options.resamples
        self._examples = 0
        self._counts: dict[str, Counter[str]] = {setting.text: Counter() for setting in options.slices}
        self._waiting: list[WaitingBatch] = []
        self._waiting_examples = self._most_waiting = 0
        self._sums: PartSums | None = None
        self._updates: PartUpdates | None = None
        self._notes: dict[str, None] = {}
        self._program: Program | None = None
        self._stored_parts: Mapping[str, Any] | None = None

    def stored(self) -> dict[str, Any] | None:
        """Return the state, for `restore`: plain values and arrays; None while batches wait to be added together."""
        if self._waiting or self._stored_parts is not None:
            return None
        return {
            "slicer": self._slicer.stored(),
            "resamples": self._resamples,
            "examples": self._examples,
            "counts": self._counts,
            "notes": list(self._notes),
            "sums": None if self._sums is None else self._sums.stored(),
            "updates": None if self._updates is None else self._updates.stored(),
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Go on from what `stored` returned for the same options. At least one batch must follow."""
        self._slicer.restore(stored["slicer"])
        self._resamples, self._examples = stored["resamples"], stored["examples"]
        self._counts = {text: Counter(of_setting) for text, of_setting in stored["counts"].items()}
        self._notes = dict.fromkeys(stored["notes"])
        self._stored_parts = stored

    def _restore_parts(self, program: Program) -> None:
        """Restore what needs the program, which is known with the first batch."""
        stored, self._stored_parts = self._stored_parts, None
        if stored is None:
            return
        if stored["sums"] is not None and program.increments is not None:
            self._sums = PartSums(program.increments, self._resamples)
            self._sums.restore(stored["sums"])
        if stored["updates"] is not None:
            self._updates = PartUpdates(program, self._resamples, self._between_pieces)
            self._updates.restore(stored["updates"])

    def add(self, batch: Batch, scored: Scored, outputs: Arrays) -> Values:
        """Add the next batch, and return what its examples are sliced by, for `members`.

        Args:
            batch: The examples.
            scored: The same, as they were scored.
            outputs: The model's outputs by name, if the options need predictions and they are known.

        Raises:
            SliceError: A feature does not exist, or has no single value for each example.
            InvalidInputError: There are too many slices in all.
        """
        targets = by_output(batch, list(self._tasks))
        columns = {**batch.inputs, **batch.features}
        values = self._slicer.values(targets, self._predictions(outputs), columns)
        self._program = scored.program
        self._restore_parts(scored.program)
        increments = scored.program.increments
        leaves = () if increments is None else increments.leaves(scored.data.as_arguments())
        self._wait(WaitingBatch(scored=scored, values=values, examples=batch.examples, leaves=leaves))
        return values

    def release(self) -> None:
        """Hold no memory of those that share it any more, as the results are there or not wanted. Idempotent."""
        with self._holding:
            self._memory.hold(0, before=self._held)
            self._held, self._is_released = 0, True

    def _hold(self, size: int) -> None:
        with self._holding:
            if not self._is_released:
                self._memory.hold(size, before=self._held)
                self._held = size

    def members(self, values: Values) -> Sequence[Members]:
        """Return the slices that the examples of a batch belong to."""
        return list(self._slicer.members(values))

    def finish(self) -> BrokenDown:
        """Return the metrics of the slices, and the intervals.

        Raises:
            InvalidInputError: There are too many slices in all.
        """
        self._flush()
        for note in (*self._slicer.notes, *self._slicer.refused().values()):
            self._note(note)
        if self._program is None:
            return BrokenDown(notes=tuple(self._notes))
        found = PartMetrics()
        unusable = None
        if self._sums is not None:
            self._sums.put_into(found)
            unusable = self._sums.unusable()
        if self._updates is not None:
            self._updates.put_into(found, unusable)
            for note in self._updates.notes:
                self._note(note)
        return self._broken_down(found)

    def _broken_down(self, found: PartMetrics) -> BrokenDown:
        intervals = {
            part: {metric: interval(values, self._options.confidence) for metric, values in of_part.items()}
            for part, of_part in found.resampled.items()
        }
        least = self._options.slice_min_examples
        slices = self._named_slices()
        scored = [
            SliceScore(
                name=part.name,
                examples=examples,
                metrics=found.metrics.get(part, {}),
                intervals=intervals.get(part, {}),
                notes=self._missing_resamples(found, part),
                undefined=found.undefined.get(part, {}),
            )
            for part, examples in slices
            if examples >= least
        ]
        skipped = [
            SliceScore(name=part.name, examples=examples, notes=(f"fewer than {least} examples",))
            for part, examples in slices
            if examples < least
        ]
        kept = {WHOLE, *(part for part, examples in slices if examples >= least)}
        return BrokenDown(
            intervals=intervals.get(WHOLE, {}),
            slices=(*scored, *skipped),
            resampled={
                f"{metric}[{part.name}]" if part.name else metric: values.astype(np.float32)
                for part, of_part in found.resampled.items()
                if part in kept
                for metric, values in of_part.items()
            },
            notes=(*self._notes, *self._missing_resamples(found, WHOLE)),
        )

    def _named_slices(self) -> list[tuple[Part, int]]:
        """Return the slices with the numbers of their examples, each name once: gates and comparisons go by it."""
        named: dict[str, tuple[Part, int]] = {}
        for part, examples in self._all_slices():
            first, _ = named.setdefault(part.name, (part, examples))
            if first != part:
                self._note(
                    f"slice {part.name!r} of {part.setting!r} is left out: {first.setting!r} has one of this name"
                )
        return list(named.values())

    def _missing_resamples(self, found: PartMetrics, part: Part) -> tuple[str, ...]:
        """Return sentences about more than a few resamples in which a part, or a metric of it, has no value."""
        few = _FEW_RESAMPLES * self._resamples
        empty = found.empty_resamples.get(part, 0)
        of_part = f"{empty} of {self._resamples} resamples draw no example, which the intervals leave out"
        of_metrics = (
            f"{metric} is undefined in {count} of {self._resamples} resamples, which its interval leaves out"
            for metric, count in found.undefined_resamples.get(part, {}).items()
            if count > few
        )
        return (*([of_part] if empty > few else []), *of_metrics)

    def _wait(self, batch: WaitingBatch) -> None:
        """Let a batch wait for others of its form, to be added together: that costs little more than one of them."""
        if self._waiting and batch.form != self._waiting[0].form:
            self._flush()
        if not self._waiting:
            self._most_waiting = self._most_examples(batch)
        self._waiting.append(batch)
        self._waiting_examples += batch.examples
        if self._waiting_examples >= self._most_waiting:
            self._flush()

    def _most_examples(self, first: WaitingBatch) -> int:
        """Return how many examples may wait at most in batches of the form of this one; 0 if each is added alone."""
        program = first.scored.program  # which may compute other outputs for joined batches if it runs the model
        if program.increments is None or program.runs_model or self._updates is not None:
            return 0
        size: int = first.scored.data.bytes
        return min(
            _WAITING_EXAMPLES,
            _WAITING_BYTES * first.examples // max(1, size),
            _WAITING_DRAWS // (1 + self._resamples),
            _WAITING_INCREMENTS // max(1, len(program.increments.initial)),
        )

    def _flush(self) -> None:
        """Add the waiting batches to the parts."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        examples, self._waiting_examples = self._waiting_examples, 0
        program = waiting[0].scored.program
        members = list(self._slicer.members(joined([each.values for each in waiting])))
        self._count(members, program.increments)
        parts = [(Part(each.setting, name), rows) for each in members for name, rows in each.rows()]
        by_example = np.ones((examples, 1 + self._resamples))
        by_example[:, 1:] = draw(self._options.seed, self._resamples, self._examples, examples).T
        draws = by_example.T
        self._examples += examples
        unusable: Collection[str] | None = None
        if program.increments is not None:
            self._sums = self._sums or PartSums(program.increments, self._resamples)
            self._sums.add(waiting, parts, draws)
            unusable = self._sums.unusable()
        if unusable is None or unusable:
            self._update(program, waiting, parts, draws, unusable)

    def _update(
        self,
        program: Program,
        batches: Sequence[WaitingBatch],
        parts: Sequence[tuple[Part, Array]],
        draws: Array,
        unusable: Collection[str] | None,
    ) -> None:
        """Update the metrics that are no sums, if that is known since the first batches."""
        if self._updates is None and draws.shape[1] == self._examples:
            self._updates = PartUpdates(program, self._resamples, self._between_pieces)
        if self._updates is None:
            names = ", ".join(unusable or ())
            self._note(
                f"{names}: no slices and no intervals, because the state of later batches is no sum over examples"
            )
            return
        self._updates.add(batches, parts, draws)

    def _predictions(self, outputs: Arrays) -> dict[str, Array] | None:
        """Return the predicted classes of the examples, for the outputs that predict one; None without outputs."""
        if not outputs:
            return None
        found = {name: predicted_classes(self._tasks[name], output) for name, output in outputs.items()}
        return {name: classes for name, classes in found.items() if classes is not None}

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _count(self, members: Sequence[Members], increments: StateIncrements | None) -> None:
        """Count examples, and drop what there may not be: settings with too many values, resamples that are too large.

        Raises:
            InvalidInputError: There are too many slices in all.
        """
        for text in self._slicer.refused():
            self._counts[text] = Counter()
            for states in (self._sums, self._updates):
                if states is not None:
                    states.forget(text)
        for each in members:
            sizes = np.bincount(each.indices, minlength=len(each.names)).tolist()
            self._counts[each.setting].update(dict(zip(each.names, sizes, strict=True)))
        slices = sum(map(len, self._counts.values()))
        if slices > MAX_SLICES:
            raise InvalidInputError(
                f"there are more than {MAX_SLICES} slices in all; give fewer, or buckets such as 'age:18,30,65'"
            )
        state = 0 if increments is None else len(increments.initial)
        size = (1 + slices) * self._resamples * state * _NUMBER_BYTES
        if size > MAX_MEMORY:
            size = 0
            self._note(
                f"there are no intervals, because {self._resamples} resamples of {slices} slices with states of "
                f"{state} numbers take more than {MAX_MEMORY // 2**20} MiB; give fewer resamples or slices"
            )
            self._resamples = 0
            for states in (self._sums, self._updates):
                if states is not None:
                    states.forget_resamples()
        self._hold(size)

    def _all_slices(self) -> Iterator[tuple[Part, int]]:
        """Yield the slices with the numbers of their examples, by setting and name."""
        for text, of_setting in self._counts.items():
            for name in sorted(of_setting, key=_sorted_by):
                yield Part(text, name), of_setting[name]


def _sorted_by(name: str) -> tuple[tuple[int, float, str], ...]:
    """Order slices by the numbers in their names, and others by their names."""
    return tuple(_key(part) for part in name.replace("=[", "=").replace(">=", "=").split(","))


def _key(part: str) -> tuple[int, float, str]:
    text = part.rpartition("=")[2] if "=" in part else part.rpartition("<")[2]
    try:
        return (0 if "<" in part else 1, float(text.rstrip(")")), part)
    except ValueError:
        return 2, 0.0, part
