"""Generated inputs of several kinds, all valid, to test models and to warm them up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.model.value_ranges import ValueRange
from understudy.evaluator.types import Array

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
