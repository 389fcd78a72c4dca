"""Reads arrays from files and finds the model's inputs and targets among them.

The keys of an ``.npz`` file are the names of the model's inputs and, for scoring, of its outputs. A single input may
also be ``x``, a single target ``y`` or ``targets``. Several may be `numpy.savez`'s ``arr_0``, ``arr_1`` and so on, the
inputs first, in the model's order. ``sample_weight`` holds a weight for each example. The server's ``--eval-data``
reads the same files.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from understudy.cli.command_errors import CommandError

if TYPE_CHECKING:
    from understudy.clients import ModelMetadata, TensorSpec

Array = npt.NDArray[Any]

_INPUT_ALIASES: Final = ("x", "arr_0")
_TARGET_ALIASES: Final = ("y", "targets", "arr_1")
_WEIGHT_KEY: Final = "sample_weight"


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Arrays ``[examples, ...]`` by name. Targets have the outputs' names; weights are ``[examples]``."""

    inputs: Mapping[str, Array]
    targets: Mapping[str, Array]
    sample_weight: Array | None = None

    @property
    def count(self) -> int:
        """The length of axis 0."""
        return len(next(iter(self.inputs.values())))

    def inputs_by(self, batch_size: int) -> Iterator[Mapping[str, Array]]:
        """Yield the inputs in order in batches of this size; the last may be smaller."""
        for examples in self._slices(batch_size):
            yield _sliced(self.inputs, examples)

    def batches_of(self, batch_size: int) -> Iterator[tuple[Any, ...]]:
        """Yield ``(inputs, targets)`` or ``(inputs, targets, weights)`` in the same batches."""
        (lone_target, *others) = self.targets.values()
        for examples in self._slices(batch_size):
            targets = _sliced(self.targets, examples) if others else lone_target[examples]
            weights = () if self.sample_weight is None else (self.sample_weight[examples],)
            yield (_sliced(self.inputs, examples), targets, *weights)

    def _slices(self, batch_size: int) -> Iterator[slice]:
        return (slice(start, start + batch_size) for start in range(0, self.count, batch_size))


def examples_to_predict(file: Path, metadata: ModelMetadata) -> Examples:
    """Return the model's inputs from a ``.npy`` or ``.npz`` file; other arrays in it are ignored.

    Raises:
        CommandError: The file cannot be read, lacks an input, or its arrays differ in length.
    """
    arrays = _read(file)
    return _checked(file, Examples(inputs=_taken(file, arrays, metadata.inputs, _INPUT_ALIASES, cast=True), targets={}))


def examples_to_score(file: Path, metadata: ModelMetadata) -> Examples:
    """Return the model's inputs, the targets of all its outputs, and the weights if any, from an ``.npz`` file.

    Raises:
        CommandError: The file cannot be read, lacks an array, or its arrays differ in length.
    """
    arrays = _read(file)
    examples = Examples(
        inputs=_taken(file, arrays, metadata.inputs, _INPUT_ALIASES, cast=True),
        targets=_taken(file, arrays, metadata.outputs, _TARGET_ALIASES, cast=False, first_place=len(metadata.inputs)),
        sample_weight=arrays.get(_WEIGHT_KEY),
    )
    return _checked(file, examples)


def write_npz(file: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as `numpy.savez` does; bfloat16, which the format lacks, becomes float32, bytes fixed-width."""
    portable = {name: _portable(array) for name, array in arrays.items()}
    try:
        with file.open("wb") as sink:
            np.savez(sink, allow_pickle=False, **portable)
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}; give another --output") from error


def _read(file: Path) -> dict[str, Array]:
    try:
        with file.open("rb") as source:
            content = np.load(source, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return {_INPUT_ALIASES[0]: content}
            return {key: content[key] for key in content.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise CommandError(
            f"{file} is not a readable .npy or .npz file ({error}); write it with numpy.save or numpy.savez, without "
            "Python objects"
        ) from error


def _taken(
    file: Path,
    arrays: Mapping[str, Array],
    specs: Sequence[TensorSpec],
    aliases: Sequence[str],
    *,
    cast: bool,
    first_place: int = 0,
) -> dict[str, Array]:
    taken = {}
    for place, spec in enumerate(specs):
        names = (spec.name, *aliases) if len(specs) == 1 else (spec.name, f"arr_{first_place + place}")
        name = next((name for name in names if name in arrays), None)
        if name is None:
            raise CommandError(
                f"{file} has the arrays {', '.join(arrays) or 'none'}; the model needs {' or '.join(names)}"
            )
        taken[spec.name] = _cast(arrays[name], spec.dtype) if cast else arrays[name]
    return taken


def _cast(array: Array, dtype: str) -> Array:
    """Return the array as the model's dtype if no kind of value is lost, as Keras would; else unchanged."""
    if dtype in ("string", "bfloat16") or array.dtype.kind not in "biuf":
        return array
    return array.astype(dtype, copy=False) if np.can_cast(array.dtype, dtype, casting="same_kind") else array


def _checked(file: Path, examples: Examples) -> Examples:
    arrays = {**examples.inputs, **examples.targets}
    if examples.sample_weight is not None:
        arrays[_WEIGHT_KEY] = examples.sample_weight
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise CommandError(
            f"the arrays of {file} have these numbers of examples: {lengths}; all need the same, at least 1"
        )
    return examples


def _sliced(arrays: Mapping[str, Array], examples: slice) -> dict[str, Array]:
    return {name: array[examples] for name, array in arrays.items()}


def _portable(array: Array) -> Array:
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return array.astype("S") if array.dtype.kind == "O" else array
