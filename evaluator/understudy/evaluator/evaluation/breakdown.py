"""The metrics of slices and of resamples, from what each example adds to the state of the metrics."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from understudy.evaluator.evaluation.draws import draw
from understudy.evaluator.evaluation.slices import (
    MAX_SLICES,
    Members,
    QuantileSample,
    SliceError,
    Slicer,
    SliceSetting,
    number_values,
    predicted_classes,
    resolved,
)
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.inputs import by_output
from understudy.evaluator.model.output_tasks import OutputTask
from understudy.evaluator.types import Array, Arrays, Batch, Interval, SliceScore

if TYPE_CHECKING:
    from understudy.evaluator.model.increments import StateIncrements  # imports TensorFlow

MAX_RESAMPLES = 10_000

SEED = 0
"""The seed of the draws of recorded evaluations, so that any two of them on the same examples are paired."""

MAX_MEMORY = 512 * 2**20
"""The most memory that the states of the resamples of one evaluation take, in bytes."""

_NUMBER_BYTES = 8


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

    def with_quantiles_of(self, read: Callable[[], Iterable[Batch]], outputs: Sequence[str]) -> BreakdownOptions:
        """Return options whose quantiles are edges, found in one pass over the data, if any quantile is requested.

        Args:
            read: Returns the batches from the beginning.
            outputs: The names of the model's outputs, in order.

        Raises:
            SliceError: A feature does not exist, or has no single number for each example, and the options are not
                lenient.
        """
        wanted = {feature.name: feature for setting in self.slices for feature in setting.features if feature.quantiles}
        if not wanted:
            return self
        samples = {name: QuantileSample() for name in wanted}
        for batch in read():
            for name, sample in samples.items():
                try:
                    sample.add(
                        number_values(wanted[name], by_output(batch, outputs), {**batch.inputs, **batch.features})
                    )
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


@dataclass(kw_only=True)
class _Sums:
    """The sums over some examples: how many, their increments, and both for each resample."""

    examples: int
    state: Array
    counts: Array
    states: Array


class Breakdown:
    """Sums the increments of examples, for all of them and for each slice. For one thread.

    Its memory depends on the state of the metrics, the slices and the resamples, not on the examples.

    Args:
        options: What to compute.
        tasks: What each output of the model is for, by its name, in the model's order.
    """

    def __init__(self, options: BreakdownOptions, tasks: Mapping[str, OutputTask]) -> None:
        self._tasks = tasks
        self._options = options
        self._slicer = Slicer(settings=options.slices, lenient=options.lenient)
        self._examples = 0
        self._whole: _Sums | None = None
        self._slices: dict[str, dict[str, _Sums]] = {setting.text: {} for setting in options.slices}
        self._resamples = options.resamples
        self._notes: dict[str, None] = {}

    def add(self, batch: Batch, increments: Array | None, outputs: Arrays) -> Sequence[Members]:
        """Add the next batch, and return the slices that its examples belong to.

        Args:
            batch: The examples.
            increments: What they add to the state, ``[examples, state]``; None if that is not known.
            outputs: The model's outputs by name, if the options need predictions and they are known.

        Raises:
            SliceError: A feature does not exist, or has no single value for each example.
        """
        targets = by_output(batch, list(self._tasks))
        columns = {**batch.inputs, **batch.features}
        members = list(self._slicer.members(targets, self._predictions(outputs), columns))
        examples = batch.examples
        if increments is None:
            return members
        state = increments.shape[1]
        self._limit(state, members)
        draws = draw(self._options.seed, self._resamples, self._examples, examples).astype(np.float64)
        if self._whole is None:
            self._whole = self._no_sums(state)
        _add(self._whole, increments, draws)
        for setting in members:
            of_setting = self._slices[setting.setting]
            for name, rows in setting.rows():
                if name not in of_setting:
                    of_setting[name] = self._no_sums(state)
                _add(of_setting[name], increments[rows], draws[:, rows])
        self._examples += examples
        return members

    def finish(
        self, increments: StateIncrements | None, summed: Sequence[bool], *, without_increments: str = ""
    ) -> BrokenDown:
        """Return the metrics of the slices, and the intervals.

        Args:
            increments: What computed the increments; None if there are none.
            summed: Whether the increments of all batches add up to the state, for each of its variables.
            without_increments: Why there are none.
        """
        for note in (*self._slicer.notes, *self._slicer.refused().values()):
            self._note(note)
        if self._whole is None or increments is None:
            self._note(f"there are neither slices nor intervals, because {without_increments}")
            return BrokenDown(notes=tuple(self._notes))
        usable = {name for name, needed in increments.needs.items() if all(summed[index] for index in needed)}
        unusable = sorted(increments.needs.keys() - usable)
        if unusable:
            self._note(
                f"{', '.join(unusable)} {'have' if len(unusable) > 1 else 'has'} neither slices nor intervals, because "
                "the state is not a sum over the examples"
            )
        scored, skipped = self._all_slices()
        parts = [("", self._whole), *scored]
        states = increments.initial + np.stack([sums.state for _, sums in parts])
        values = _only(increments.results(states), usable)
        resampled = self._resampled(increments, parts, usable)
        intervals = {name: self._intervals(of_part) for name, of_part in resampled.items()}
        slices = [
            SliceScore(
                name=name,
                examples=sums.examples,
                metrics={metric: float(of_parts[index]) for metric, of_parts in values.items()},
                intervals=intervals.get(name, {}),
            )
            for index, (name, sums) in enumerate(parts)
            if index
        ]
        return BrokenDown(
            intervals=intervals.get("", {}),
            slices=(*slices, *skipped),
            resampled={
                f"{metric}[{name}]" if name else metric: found.astype(np.float32)
                for name, of_part in resampled.items()
                for metric, found in of_part.items()
            },
            notes=tuple(self._notes),
        )

    def _predictions(self, outputs: Arrays) -> dict[str, Array]:
        """Return the predicted classes of the examples, for the outputs that predict one."""
        found = {}
        for name, output in outputs.items():
            task = self._tasks[name]
            if task.kind not in {"regression", "multilabel"}:
                found[name] = predicted_classes(output, threshold=0.0 if task.scores == "logits" else 0.5)
        return {name: classes for name, classes in found.items() if classes is not None}

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _no_sums(self, state: int) -> _Sums:
        return _Sums(
            examples=0,
            state=np.zeros(state),
            counts=np.zeros(self._resamples),
            states=np.zeros((self._resamples, state)),
        )

    def _limit(self, state: int, members: list[Members]) -> None:
        """Drop settings with too many values, and the resamples if their states would need too much memory."""
        for text in self._slicer.refused():
            self._slices[text] = {}
        count = 1 + sum(
            len(of_setting.keys() | set(_names(members, text))) for text, of_setting in self._slices.items()
        )
        if count - 1 > MAX_SLICES:
            raise InvalidInputError(
                f"there are more than {MAX_SLICES} slices in all; give fewer, or buckets such as 'age:18,30,65'"
            )
        needed = count * self._resamples * state * _NUMBER_BYTES
        if needed > MAX_MEMORY:
            self._note(
                f"there are no intervals, because {self._resamples} resamples of {count - 1} slices with states of "
                f"{state} numbers take more than {MAX_MEMORY // 2**20} MiB; give fewer resamples or slices"
            )
            self._resamples = 0
            for sums in (self._whole, *(sums for of_setting in self._slices.values() for sums in of_setting.values())):
                if sums is not None:
                    sums.counts, sums.states = np.zeros(0), np.zeros((0, state))

    def _all_slices(self) -> tuple[list[tuple[str, _Sums]], list[SliceScore]]:
        """Return the slices that are scored, and the scores of those with too few examples, by setting and name."""
        least = self._options.slice_min_examples
        found = [
            (name, sums)
            for of_setting in self._slices.values()
            for name, sums in sorted(of_setting.items(), key=lambda item: _sorted_by(item[0]))
        ]
        skipped = [
            SliceScore(name=name, examples=sums.examples, notes=(f"fewer than {least} examples",))
            for name, sums in found
            if sums.examples < least
        ]
        return [(name, sums) for name, sums in found if sums.examples >= least], skipped

    def _resampled(
        self, increments: StateIncrements, parts: Sequence[tuple[str, _Sums]], usable: Iterable[str]
    ) -> dict[str, dict[str, Array]]:
        """Return the metrics of each part in each resample; NaN where a resample has none of its examples."""
        if not self._resamples:
            return {}
        found = {}
        for name, sums in parts:
            values = _only(increments.results(increments.initial + sums.states), usable)
            drawn = sums.counts > 0
            found[name] = {metric: np.where(drawn, of_metric, np.nan) for metric, of_metric in values.items()}
        return found

    def _intervals(self, values: Mapping[str, Array]) -> dict[str, Interval]:
        return {name: interval(of_metric, self._options.confidence) for name, of_metric in values.items()}


def interval(values: Array, confidence: float) -> Interval:
    """Return the percentile interval of a metric's values in the resamples; those that are NaN do not count."""
    tail = (1.0 - confidence) / 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values that are all NaN
        low, high = np.nanquantile(values, [tail, 1.0 - tail])
    return Interval(low=float(low), high=float(high))


def _add(sums: _Sums, increments: Array, draws: Array) -> None:
    sums.examples += len(increments)
    sums.state += increments.sum(axis=0)
    if len(sums.counts):
        sums.counts += draws.sum(axis=1)
        sums.states += draws @ increments


def _names(members: Iterable[Members], setting: str) -> Iterator[str]:
    for found in members:
        if found.setting == setting:
            yield from found.names


def _only(values: Mapping[str, Array], usable: Iterable[str]) -> dict[str, Array]:
    """Return the metrics that are usable; one with several values is there as ``name/0``, ``name/1``, ..."""
    names = set(usable)
    return {name: found for name, found in values.items() if name in names or name.rpartition("/")[0] in names}


def _sorted_by(name: str) -> tuple[tuple[int, float, str], ...]:
    """Order slices by the numbers in their names, and others by their names."""
    return tuple(_key(part) for part in name.replace("=[", "=").replace(">=", "=").split(","))


def _key(part: str) -> tuple[int, float, str]:
    text = part.rpartition("=")[2] if "=" in part else part.rpartition("<")[2]
    try:
        return (0 if "<" in part else 1, float(text.rstrip(")")), part)
    except ValueError:
        return 2, 0.0, part
