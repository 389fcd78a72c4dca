"""Runs a model on generated inputs to determine properties that its graph does not show."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
import tensorflow as tf

from understudy.checkpoints.signature import TensorSpec
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import InvalidInputError, LoadError
from understudy.evaluator.model.graph_analysis import ValueRange
from understudy.evaluator.types import Array, Arrays

_log = logging.getLogger(__name__)

ExampleKind = Literal["padded", "full", "zeros"]
"""How inputs are filled.

padded: Sequences of several lengths, padded with zeros at the end, as masks on GPUs require.
full: No zeros among tokens.
zeros: Zeros and empty strings.
"""

_WORD = "a"
_LARGEST_ID = 1000
_SEQUENCE_RANK = 2
_FEATURES_RANK = 3
Run = Callable[[Arrays], dict[str, Any]]
_LENGTHS = (8, 64, 256)
_EXAMPLES_PER_REPLICA = 4


def kinds_of(specs: Sequence[TensorSpec]) -> tuple[ExampleKind, ...]:
    """Return the kinds to try; without ``padded`` if no input may be a sequence."""
    return ("padded", "full") if any(_is_sequence(spec) for spec in specs) else ("full",)


def example_inputs(
    specs: Sequence[TensorSpec],
    kind: ExampleKind,
    *,
    examples: int,
    length: int,
    ranges: Mapping[str, ValueRange] | None = None,
) -> dict[str, Array]:
    """Return inputs that match the specifications, the same for the same arguments.

    Args:
        specs: The inputs to generate.
        kind: How to fill them.
        examples: The number of examples.
        length: The length of every axis of unspecified length.
        ranges: The valid ids of inputs, by name.
    """
    generator = np.random.default_rng(0)
    filled = generator.uniform(size=examples) if kind == "padded" else np.ones(examples)
    made = {}
    for spec in specs:
        shape = (examples, *(length if axis is None else axis for axis in spec.shape[1:]))
        made[spec.name] = _zeros(spec, shape) if kind == "zeros" else _values(spec, shape, generator, ranges or {})
        if kind == "padded" and _is_sequence(spec):
            _pad(made[spec.name], filled)
    return made


def _is_sequence(spec: TensorSpec) -> bool:
    """Whether axis 1 may be time: tokens ``[batch, time]``, features ``[batch, time, features]``, text ``[batch]``."""
    rank = len(spec.shape)
    if spec.dtype == "string":
        return True
    return rank == _FEATURES_RANK or (rank == _SEQUENCE_RANK and not _is_float(_numpy_dtype(spec.dtype)))


def _zeros(spec: TensorSpec, shape: Sequence[int]) -> Array:
    if spec.dtype == "string":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, _numpy_dtype(spec.dtype))


def _values(
    spec: TensorSpec, shape: Sequence[int], generator: np.random.Generator, ranges: Mapping[str, ValueRange]
) -> Array:
    if spec.dtype == "string":
        return np.full(shape, _text(8) if len(shape) == 1 else _WORD.encode(), dtype=object)
    dtype = _numpy_dtype(spec.dtype)
    if not _is_float(dtype):
        return _ids(shape, generator, ranges.get(spec.name)).astype(dtype)
    if spec.name in ranges:
        return _ids(shape, generator, ranges[spec.name]).astype(dtype)
    return generator.normal(size=shape).astype(dtype)


def _ids(shape: Sequence[int], generator: np.random.Generator, value_range: ValueRange | None) -> Array:
    """Return ids other than the padding id 0 if possible; ids of scalars may be 0, which is not padding there."""
    largest = 1 if value_range is None else min(value_range.high, _LARGEST_ID)
    least = 0 if len(shape) == 1 or largest == 0 else 1
    return generator.integers(least, largest + 1, shape)


def _pad(array: Array, filled: Array) -> None:
    """Pad the end of each example, keeping at least one step."""
    for example, share in enumerate(filled):
        if array.ndim == 1:
            array[example] = _text(math.ceil(share * 8))
        else:
            array[example, max(1, math.ceil(share * array.shape[1])) :] = b"" if array.dtype == object else 0


def _text(words: int) -> bytes:
    return " ".join(itertools.repeat(_WORD, max(1, words))).encode()


def _is_float(dtype: Any) -> bool:
    return not (np.issubdtype(dtype, np.integer) or dtype == np.bool_)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Probe:
    """Runs a model on generated inputs, of the kinds that it accepts. Not thread-safe.

    A model may refuse a kind: cuDNN accepts neither a sequence that is padded elsewhere than at its end nor one that is
    all padding. A model is refused only if it runs on no kind.

    Args:
        run: Runs the model.
        specs: Its inputs.
        ranges: The valid ids of inputs, by name.

    Raises:
        InvalidInputError: The model refuses the values of every kind.
        tf.errors.OpError: It runs on no kind, for another reason.
    """

    def __init__(self, run: Run, specs: Sequence[TensorSpec], ranges: Mapping[str, ValueRange]) -> None:
        self._run = run
        self._specs = specs
        self._ranges = ranges
        self._length, self._kinds = self._find_kinds()

    def run(self, examples: int, *, by: Run | None = None) -> None:
        """Run the model on a batch of this size, with another function if one is given."""
        self._run_one(examples, self._length, self._kinds, by or self._run)

    def example(self, examples: int) -> dict[str, Array]:
        """Return a batch of this size on which the model ran."""
        return self._inputs(self._kinds[0], examples, self._length)

    def examples_of_each_kind(self, examples: int) -> Iterator[dict[str, Array]]:
        """Yield a batch of this size of each kind on which the model ran."""
        for kind in self._kinds:
            yield self._inputs(kind, examples, self._length)

    def examples_depend_on_each_other(self, *, replicas: int) -> bool:
        """Whether an example's outputs depend on its batch, as with a BatchNorm that is not frozen at inference.

        Raises:
            LoadError: An output does not have one example for each example of input.
        """
        return any(self._couples_examples(kind, _EXAMPLES_PER_REPLICA * replicas) for kind in self._kinds)

    def _find_kinds(self) -> tuple[int, tuple[ExampleKind, ...]]:
        """Return a length for axes of any length, and the kinds on which the model runs at that length.

        A network with many pooling layers needs a large image.
        """
        lengths = _LENGTHS if any(None in spec.shape[1:] for spec in self._specs) else _LENGTHS[:1]
        for length in lengths:
            failures = {kind: self._failure(kind, 1, length, self._run) for kind in kinds_of(self._specs)}
            working = tuple(kind for kind, failure in failures.items() if failure is None)
            if working:
                _log_failures(failures)
                return length, working
            if self._failure("zeros", 1, length, self._run) is None:
                _log_failures(failures)
                return length, ("zeros",)
        self._run_one(1, lengths[-1], kinds_of(self._specs), self._run)
        return lengths[-1], kinds_of(self._specs)

    def _run_one(self, examples: int, length: int, kinds: Sequence[ExampleKind], run: Run) -> None:
        """Run the first of some kinds on which the model runs, or raise the error of the first kind."""
        failures: dict[ExampleKind, Exception | None] = {}
        for kind in kinds:
            failures[kind] = self._failure(kind, examples, length, run)
            if failures[kind] is None:
                _log_failures(failures)
                return
        raise next(failure for failure in failures.values() if failure is not None)

    def _failure(self, kind: ExampleKind, examples: int, length: int, run: Run) -> Exception | None:
        """Run the model on one kind; return the error if the kind may be the cause, else None."""
        try:
            run(self._inputs(kind, examples, length))
        except tf.errors.ResourceExhaustedError:
            raise
        except (InvalidInputError, tf.errors.OpError) as error:
            return error
        return None

    def _inputs(self, kind: ExampleKind, examples: int, length: int) -> dict[str, Array]:
        return example_inputs(self._specs, kind, examples=examples, length=length, ranges=self._ranges)

    def _couples_examples(self, kind: ExampleKind, examples: int) -> bool:
        batch = self._inputs(kind, examples, self._length)
        together = {name: np.asarray(tensor) for name, tensor in self._run(batch).items()}
        _check_batch_major(together, examples)
        alone = self._run({name: array[:1] for name, array in batch.items()})
        return not all(_close(array[:1], np.asarray(alone[name])) for name, array in together.items())


def _log_failures(failures: Mapping[ExampleKind, Exception | None]) -> None:
    for kind, failure in failures.items():
        if failure is not None:
            _log.warning(
                "the model does not run on one kind of made-up inputs",
                extra={"kind": kind, "reason": first_line(failure)},
            )


def _check_batch_major(outputs: Arrays, examples: int) -> None:
    for name, array in outputs.items():
        if array.shape[:1] != (examples,):
            raise LoadError(
                f"output {name!r} has shape {list(array.shape)} for {examples} examples of input; a model whose "
                "outputs do not "
                f"have one example for each example of input, [{examples}, ...], cannot be split over replicas or "
                "batches"
            )


def _close(left: Array, right: Array) -> bool:
    """Whether two outputs differ by no more than the rounding of a long computation."""
    if left.dtype.kind not in "fc":
        return bool(np.array_equal(left, right))
    return bool(np.allclose(left, right, rtol=1e-2, atol=1e-3, equal_nan=True))
