"""Scores streams of batches on a slot, each stream with its own state."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.checkpoints.signature import TensorSpec
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.forward import tensor_spec
from understudy.evaluator.model.graph_analysis import ValueRange
from understudy.evaluator.model.inputs import ALL_TARGETS, ALL_WEIGHTS, check_batch, check_values, dtype_name
from understudy.evaluator.model.misfits import UNFIT
from understudy.evaluator.model.scoring_program import ProgramState, ScoringData, ScoringProgram, alone
from understudy.evaluator.types import Array, Arrays, Batch

_MAX_PROGRAMS = 8

_TEXT = "OSU"
"""The kinds of dtypes of text."""

MAX_COMPARISONS = 2**24
"""The limit for comparisons of a batch's elements with listed thresholds: Keras builds an array of all pairs."""

_BATCH_AXIS = frozenset({0})


class _LabelForm(NamedTuple):
    """The dtype and the shape of targets or weights; a length of None is any."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        lengths = ("any" if length is None else str(length) for length in self.shape[1:])
        return f"{self.name}: {self.dtype}[{', '.join(('examples', *lengths))}]"


Structure = tuple[tuple[_LabelForm, ...], ...]
"""The forms of a batch's targets and weights, the key of its program: others need another program."""
ProgramBuilder = Callable[[ScoringData], ScoringProgram]


class GatheredForward(Protocol):
    """The part of the forward pass that scoring uses."""

    @property
    def output_specs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The `tf.TensorSpec`s of the results of a call."""

    def __call__(
        self, inputs: Mapping[str, Any], between_pieces: Callable[[], None] = ...
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the outputs, ``[examples, ...]`` tensors, and the masks of those that have one, by name."""


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """What is needed of a batch, and the states before and after it. Immutable."""

    program: ScoringProgram
    data: ScoringData
    before: ProgramState
    after: ProgramState


@dataclass(frozen=True, kw_only=True)
class ScoreState:
    """The state of one stream. Immutable: `Scorer.update` returns a new one.

    ``example_losses`` are those of the last batch, float64 ``[examples]``, if requested and available. ``outputs`` are
    the model's for the last batch, by name, if requested, and ``masks`` are those of all outputs that have one; both
    are empty if the program itself runs the model. ``scored`` is the last batch with the states around it, from which
    slices and resamples are computed, if requested.
    """

    program: ScoringProgram | None = None
    structure: Structure = ()
    values: ProgramState | None = None
    examples: int = 0
    batches: int = 0
    example_losses: Array | None = None
    outputs: Arrays = field(default_factory=dict)
    masks: Arrays = field(default_factory=dict)
    scored: ScoredBatch | None = None
    counting: Mapping[str, bool] = field(default_factory=dict)

    def stored(self) -> dict[str, Any]:
        """Return what the score depends on, for `restored`: plain values and arrays. There must have been a batch."""
        if self.values is None:
            raise RuntimeError("the stream has no batch yet")
        counts = {"examples": self.examples, "batches": self.batches, "counting": dict(self.counting)}
        return {"values": self.values.stored(), **counts}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> ScoreState:
        """Return a state that goes on from what `stored` returned, with batches of the same structure."""
        counts = {name: stored[name] for name in ("examples", "batches", "counting")}
        return cls(values=ProgramState.restored(stored["values"]), **counts)

    @property
    def without_example_losses(self) -> str:
        """Why there are no per-example losses although they were requested; empty otherwise."""
        return "" if self.program is None else self.program.without_example_losses


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Targets by the names of outputs, and weights by the names of outputs or for all, as arrays or specifications."""

    targets: Mapping[str, Any]
    weights: Mapping[str, Any]

    def shown(self) -> str:
        """Return the names, dtypes and shapes of the arrays, for a message."""
        targets, weights = (
            {name: f"{dtype_name(array)}{list(array.shape)}" for name, array in arrays.items()}
            for arrays in (self.targets, self.weights)
        )
        return f"targets: {targets or 'none'}" + (f"; sample weights: {weights}" if weights else "")


@dataclass(frozen=True, kw_only=True)
class CheckedBatch:
    """A batch that fits a model, and what its score needs to know of it. Made by `Scorer.check`.

    Attributes:
        batch: The batch.
        labels: Its targets and weights by output.
        structure: The key of the program that it needs.
    """

    batch: Batch
    labels: Labels
    structure: Structure


class Scorer:
    """Computes the loss and metrics of streams of batches exactly as one device would. Thread-safe.

    The outputs are gathered from all replicas, then loss and metrics are updated once on the whole batch without
    padding. The first batch of each structure of targets and weights traces a program, which takes a while; `prepare`
    does that ahead of `update`.

    Args:
        interface: The structures of the model's inputs and outputs.
        forward: Its forward pass; None if the program itself runs the model on the whole batch.
        build: Traces a program for batches of the given specification.
        comparisons: The number of thresholds that the metrics compare with each element of a batch.
        input_ranges: The valid ids of inputs, by name.
    """

    def __init__(
        self,
        interface: ModelInterface,
        *,
        forward: GatheredForward | None,
        build: ProgramBuilder,
        comparisons: int = 1,
        input_ranges: Mapping[str, ValueRange],
    ) -> None:
        self._interface = interface
        self._comparisons = comparisons
        self._forward = forward
        self._input_ranges = input_ranges
        self._build = build
        self._lock = threading.Lock()
        self._programs: OrderedDict[Structure, ScoringProgram] = OrderedDict()
        self._open_axes = _open_axes(interface.outputs.specs)

    def start(self) -> ScoreState:
        """Return the state of a new stream."""
        return ScoreState()

    def check(self, batch: Batch) -> CheckedBatch:
        """Return the batch for the other methods; raise InvalidInputError if it does not fit the model."""
        examples = check_batch(batch, self._interface.inputs.specs, self._interface.outputs.specs)
        self._check_comparisons(batch, examples)
        labels = self._labels(batch)
        structure = (self._forms(labels.targets), self._forms(labels.weights))
        return CheckedBatch(batch=batch, labels=labels, structure=structure)

    def is_prepared(self, checked: CheckedBatch) -> bool:
        """Whether `update` would run without tracing on a batch like this."""
        return checked.structure in self._programs

    def prepare(self, checked: CheckedBatch) -> ScoringProgram:
        """Return the program for batches like this one, tracing it if there is none yet.

        Raises:
            InvalidInputError: The targets or weights do not fit the model's loss and metrics.
        """
        structure = checked.structure
        with self._lock:
            if structure not in self._programs:
                self._programs[structure] = self._trace(checked)
            if len(self._programs) > _MAX_PROGRAMS:
                self._programs.popitem(last=False)
            return self._programs[structure]

    def update(
        self,
        state: ScoreState,
        batch: Batch | CheckedBatch,
        *,
        between_pieces: Callable[[], None] = lambda: None,
        keep_outputs: bool = False,
    ) -> ScoreState:
        """Return the state after another batch.

        Args:
            state: The result of `start` or of the last `update`.
            batch: Examples to score; what `check` returned is not checked again.
            between_pieces: Called between the pieces of a large batch.
            keep_outputs: Whether the new state holds the outputs of the batch.

        Raises:
            InvalidInputError: The batch does not fit the model, holds an id or a class that does not exist, or differs
                in structure from the previous ones.
        """
        checked = batch if isinstance(batch, CheckedBatch) else self.check(batch)
        batch, labels, structure = checked.batch, checked.labels, checked.structure
        if state.structure not in {(), structure}:
            raise InvalidInputError(
                "the batches of one stream must have targets and sample weights of the same kind; "
                f"the first had {_kind(state.structure)}, this one has {_kind(structure)}"
            )
        program = state.program or self._programs.get(structure) or self.prepare(checked)
        check_values("input", batch.inputs, self._input_ranges)
        text = [name for name, array in labels.targets.items() if array.dtype.kind in _TEXT]
        numbers = {name: array for name, array in labels.targets.items() if name not in text}
        check_values("target", numbers, self._target_ranges(program, labels))
        with tf.device("CPU:0"):  # each device copies its share from there
            inputs = {name: tf.convert_to_tensor(array) for name, array in batch.inputs.items()}
        outputs, masks = self._forward(inputs, between_pieces) if self._forward else ({}, {})
        data = self._data(inputs, labels, outputs, masks)
        try:
            before = state.values or program.initial
            values = program.update(before, data)
            example_losses = program.example_losses(data) if program.example_losses else None
        except tf.errors.UnimplementedError as error:
            if not text:
                raise
            raise InvalidInputError(
                f"the targets of {text[0]!r} hold text, which the model's loss and metrics do not take "
                f"({labels.shown()})"
            ) from error
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            reason = (
                program.misfit(data, error) or f"the batch cannot be scored: {first_line(error)} ({labels.shown()})"
            )
            raise InvalidInputError(reason) from error
        masks_of_outputs = {name: np.asarray(mask) for name, mask in masks.items()}
        return ScoreState(
            program=program,
            structure=structure,
            values=values,
            examples=state.examples + batch.examples,
            batches=state.batches + 1,
            example_losses=example_losses,
            outputs={name: np.asarray(output) for name, output in outputs.items()} if keep_outputs else {},
            masks=masks_of_outputs,
            counting={
                name: state.counting.get(name, False) or bool(counts.any())
                for name, counts in program.counting(data).items()
            },
            scored=ScoredBatch(program=program, data=program.needed(data), before=before, after=values)
            if program.is_broken_down
            else None,
        )

    def result(self, state: ScoreState) -> dict[str, float]:
        """Return the loss (as ``loss``) and every metric of a stream by name, as Keras gives them.

        Raises:
            InvalidInputError: The stream has no batch.
        """
        if state.program is None or state.values is None:
            raise InvalidInputError("the stream ended without a batch; at least one was expected")
        return state.program.result(state.values)

    def undefined(self, state: ScoreState) -> dict[str, str]:
        """Return why values of the `result` of a stream are undefined, by name; empty if all are defined."""
        if state.program is None or state.values is None:
            return {}
        without = {name: np.array([not counts]) for name, counts in state.counting.items()}
        found = {**state.program.undefined([state.values]), **state.program.undefined_losses(without)}
        return {name: reason for name, each in found.items() if (reason := each.reason())}

    def metric_digests(self, state: ScoreState, names: Iterable[str]) -> dict[str, str]:
        """Return what identifies the configuration of each metric, by its name in the `result` of a stream."""
        if state.program is None or state.values is None:
            return {}
        return state.program.metric_digests(state.values, names)

    def _check_comparisons(self, batch: Batch, examples: int) -> None:
        """Refuse a batch if comparing its elements with the thresholds would need gigabytes."""
        if self._comparisons == 1:
            return
        outputs = (
            examples * math.prod(length or 1 for length in spec.shape[1:]) for spec in self._interface.outputs.specs
        )
        elements = max(*outputs, *(array.size for array in batch.targets.values()), 0, 0)
        if elements * self._comparisons > MAX_COMPARISONS:
            raise InvalidInputError(
                f"got {elements} elements in a batch and {self._comparisons} thresholds; at most {MAX_COMPARISONS} "
                "comparisons are made at once: send smaller batches or fewer thresholds"
            )

    def _trace(self, checked: CheckedBatch) -> ScoringProgram:
        inputs = {spec.name: tensor_spec(spec) for spec in self._interface.inputs.specs}
        targets, weights = map(_specs, checked.structure)
        outputs, masks = self._forward.output_specs if self._forward else ({}, {})
        try:
            return self._build(self._data(inputs, Labels(targets=targets, weights=weights), outputs, masks))
        except UNFIT as error:
            raise InvalidInputError(self._unfit(checked.labels, first_line(error))) from error

    def _unfit(self, labels: Labels, why: str) -> str:
        missing = [name for name in self._interface.outputs.names if name not in labels.targets]
        of_missing = ", ".join(map(repr, missing))
        if not labels.targets:
            named = "this name or as 'y'" if len(missing) == 1 else "these names"
            return (
                f"there are no targets of {of_missing}, which the model's loss and metrics need ({why.rstrip('.')}); "
                f"give them under {named}{self._in_a_file()}"
            )
        without = f"; there are none of {of_missing}" if missing else ""
        return f"the targets do not fit the model's loss and metrics: {why} ({labels.shown()}{without})"

    def _in_a_file(self) -> str:
        """Return what to call targets in a file if inputs have their names."""
        inputs, outputs = self._interface.inputs.names, self._interface.outputs.names
        if not set(inputs) & set(outputs):
            return ""
        places = ", ".join(repr(f"arr_{place}") for place in range(len(inputs), len(inputs) + len(outputs)))
        return f"; in a file, where inputs have the same names, as {places}"

    def _labels(self, batch: Batch) -> Labels:
        """Key targets by outputs, and give every output a weight if one output has its own."""
        names = self._interface.outputs.names
        targets = {names[0] if name == ALL_TARGETS else name: array for name, array in batch.targets.items()}
        weights = dict(batch.sample_weights)
        if len(names) == 1 and names[0] in weights:
            weights = {ALL_WEIGHTS: weights[names[0]]}
        elif weights and ALL_WEIGHTS not in weights:
            weights = {name: weights.get(name, np.ones(batch.examples, np.float32)) for name in names}
        return Labels(targets=targets, weights=weights)

    def _target_ranges(self, program: ScoringProgram, labels: Labels) -> dict[str, ValueRange]:
        """Return the ranges of targets by the names of the outputs they belong to."""
        if not any(program.target_ranges):
            return {}
        names = tf.nest.flatten(self._like_outputs({name: name for name in labels.targets}))
        present = [name for name in names if name is not None]
        return {name: found for name, found in zip(present, program.target_ranges, strict=True) if found is not None}

    def _forms(self, arrays: Arrays) -> tuple[_LabelForm, ...]:
        """Return the forms of labels in the order of their names: the batch axis and open axes have any length."""
        return tuple(self._form(name, arrays[name]) for name in sorted(arrays))

    def _form(self, name: str, array: Array) -> _LabelForm:
        open_axes = self._open_axes.get(name, _BATCH_AXIS)
        shape = tuple(None if axis in open_axes else length for axis, length in enumerate(array.shape))
        return _LabelForm(name, dtype_name(array), shape)

    def _data(
        self, inputs: Mapping[str, Any], labels: Labels, outputs: Mapping[str, Any], masks: Mapping[str, Any]
    ) -> ScoringData:
        return ScoringData(
            inputs=self._interface.inputs.unflatten(inputs),
            targets=self._like_outputs(labels.targets),
            sample_weights=labels.weights.get(ALL_WEIGHTS, self._like_outputs(labels.weights)),
            outputs=outputs,
            masks=masks,
        )

    def _like_outputs(self, leaves: Mapping[str, Any]) -> Any:
        """Nest labels like the model's outputs, with None for missing ones; return None if there are no labels."""
        if not leaves:
            return None
        complete = {name: leaves.get(name) for name in self._interface.outputs.names}
        return alone(self._interface.outputs.unflatten(complete))


def _open_axes(outputs: Sequence[TensorSpec]) -> dict[str, frozenset[int]]:
    """Return the axes of any length by the names of labels; weights for all outputs are like the first."""
    axes = {
        spec.name: _BATCH_AXIS.union(i for i, length in enumerate(spec.shape) if length is None) for spec in outputs
    }
    return {**axes, ALL_WEIGHTS: next(iter(axes.values()), _BATCH_AXIS)}


def _specs(forms: Iterable[_LabelForm]) -> dict[str, Any]:
    return {form.name: tf.TensorSpec(form.shape, tf.as_dtype(form.dtype)) for form in forms}


def _kind(structure: Structure) -> str:
    """Describe the targets and sample weights of a batch."""
    return " and ".join(
        f"{what} {', '.join(map(str, forms)) or 'none'}"
        for what, forms in zip(("targets", "sample weights"), structure, strict=True)
    )
