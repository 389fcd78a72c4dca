"""Checks a caller's inputs against the model's signature and the values that it takes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Arrays, Batch

if TYPE_CHECKING:
    from understudy.evaluator.model.graph_analysis import ValueRange  # imports TensorFlow

ALL_TARGETS = "targets"
ALL_WEIGHTS = "sample_weights"


def check_inputs(inputs: Arrays, specs: Sequence[TensorSpec]) -> int:
    """Return the number of examples.

    Raises:
        InvalidInputError: A name, dtype or shape does not match the model, there is no example, or the inputs have
            different numbers of examples.
    """
    return check_forms({name: ArrayForm(dtype_name(array), array.shape) for name, array in inputs.items()}, specs)


def check_forms(forms: Mapping[str, ArrayForm], specs: Sequence[TensorSpec]) -> int:
    """Return the number of examples of inputs that need not be built yet. Raises as `check_inputs` does."""
    _check_names(forms, specs)
    examples = 0
    for spec in specs:
        form = forms[spec.name]
        _check_dtype(form, spec)
        _check_shape(form, spec)
        examples = _check_examples(f"input {spec.name!r}", form.shape, examples)
    return examples


def check_values(kind: str, arrays: Mapping[str, Any], ranges: Mapping[str, ValueRange]) -> None:
    """Raise InvalidInputError for the first value outside its range.

    Args:
        kind: The kind of the arrays, for the message: ``input`` or ``target``.
        arrays: NumPy arrays, or tensors on the host, by name, each ``[examples, ...]``.
        ranges: The ranges by name, for some of the arrays.
    """
    for name, value_range in ranges.items():
        if name in arrays:
            value_range.check(f"{kind} {name!r}", np.asarray(arrays[name]))


def check_batch(batch: Batch, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Return the number of examples of a batch to score.

    Raises:
        InvalidInputError: The inputs do not fit, or a target or weight has a name that no output has, or another
            number of examples than the inputs.
    """
    _check_names(batch.inputs, inputs, _feature_note(batch.inputs, inputs))
    examples = check_inputs(batch.inputs, inputs)
    names = [spec.name for spec in outputs]
    note = _positional_note("output", outputs)
    _check_labels("target", batch.targets, [*names, ALL_TARGETS] if len(names) == 1 else names, examples, note)
    _check_labels("sample weight", batch.sample_weights, [*names, ALL_WEIGHTS], examples, note)
    for name, array in batch.sample_weights.items():
        if array.dtype.kind not in "fiub" and dtype_name(array) != "bfloat16":
            raise InvalidInputError(f"sample weight {name!r} has dtype {dtype_name(array)}; numbers were expected")
        _check_finite(name, array)
    for name, array in batch.features.items():
        if array.ndim == 0:
            raise InvalidInputError(f"feature {name!r} is a scalar; [{examples}] was expected")
        _check_examples(f"feature {name!r}", array.shape, examples)
    return examples


def by_output(batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
    """Return the targets of a batch by the names of the outputs, which are given in the model's order."""
    return {outputs[0] if name == ALL_TARGETS else name: array for name, array in batch.targets.items()}


def _check_finite(name: str, weights: Array) -> None:
    if weights.dtype.kind != "f" or np.isfinite(weights).all():
        return
    place = tuple(int(index) for index in np.argwhere(~np.isfinite(weights))[0])
    raise InvalidInputError(
        f"sample weight {name!r} is {weights[place]} for example {place[0]} of the batch; a finite number was expected"
    )


def dtype_name(array: Array) -> str:
    """Return NumPy's name of the dtype, or ``string`` for byte and text strings."""
    return _name_of(array.dtype)


@functools.lru_cache(maxsize=64)  # NumPy builds the name each time; text dtypes differ by length
def _name_of(dtype: np.dtype[Any]) -> str:
    return "string" if dtype.kind in "SUO" else str(dtype.name)


def _positional_note(kind: str, specs: Sequence[TensorSpec]) -> str:
    """Return a note for errors about names: which of the model's names are positional; empty if there are none.

    Args:
        kind: ``input`` or ``output``.
        specs: All of that kind, in the model's order.
    """
    made_up = [spec.name for spec in specs if spec.positional]
    if not made_up:
        return ""
    if len(specs) == 1:
        return f". The model has one {kind}, here called {made_up[0]!r}, because Keras generated its name"
    return f". Keras generated the names of {_list(made_up)}, which are positions in the model's order"


def _feature_note(arrays: Mapping[str, Any], specs: Sequence[TensorSpec]) -> str:
    """Return a note for errors about the names of a batch to score: which arrays are not those of inputs."""
    others = sorted(arrays.keys() - {spec.name for spec in specs})
    if len(arrays) - len(others) < len(specs):
        return ""
    are, them = ("is a feature", "it") if len(others) == 1 else ("are features", "them")
    return f"; {_list(others)} {are} of the batch if slices need {them}"


def _check_names(arrays: Mapping[str, Any], specs: Sequence[TensorSpec], note: str = "") -> None:
    expected = [spec.name for spec in specs]
    if arrays.keys() != set(expected):
        raise InvalidInputError(
            f"got the inputs {_list(arrays)}; expected {_list(expected)}{_positional_note('input', specs)}{note}"
        )


def _check_dtype(form: ArrayForm, spec: TensorSpec) -> None:
    if form.dtype != spec.dtype:
        raise InvalidInputError(
            f"input {spec.name!r} has dtype {form.dtype}; {spec.dtype} was expected: convert the values first"
        )


def _check_shape(form: ArrayForm, spec: TensorSpec) -> None:
    fits = len(form.shape) == len(spec.shape) and all(
        expected in {None, length} for length, expected in zip(form.shape, spec.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if length is None else str(length) for length in spec.shape[1:])
        came = list(form.shape)
        raise InvalidInputError(
            f"input {spec.name!r} has shape {came}; [{', '.join(filter(None, ['examples', expected]))}] was expected"
        )


def _check_labels(kind: str, arrays: Arrays, allowed: Sequence[str], examples: int, note: str) -> None:
    unknown = arrays.keys() - set(allowed)
    if unknown:
        raise InvalidInputError(f"got the {kind}s {_list(sorted(unknown))}; expected {_list(allowed)}{note}")
    if len(arrays) > 1 and allowed[-1] in {ALL_TARGETS, ALL_WEIGHTS} and allowed[-1] in arrays:
        raise InvalidInputError(f"got the {kind}s {_list(sorted(arrays))}; {allowed[-1]!r} must be the only one")
    for name, array in arrays.items():
        if array.ndim == 0:
            raise InvalidInputError(f"{kind} {name!r} is a scalar; [{examples}, ...] was expected")
        _check_examples(f"{kind} {name!r}", array.shape, examples)


def _check_examples(what: str, shape: Sequence[int], examples: int) -> int:
    came = int(shape[0])
    if came == 0:
        raise InvalidInputError(f"{what} has no examples; at least 1 was expected")
    if examples not in {0, came}:
        raise InvalidInputError(f"{what} has {came} examples; {examples} were expected, as many as the first input has")
    return came


def _list(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"
