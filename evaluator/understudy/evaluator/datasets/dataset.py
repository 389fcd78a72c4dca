"""Evaluation datasets: the interface, and datasets held in memory or in an ``.npz`` file."""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.types import Array, Arrays, Batch

TARGETS = "targets"
"""The name of the targets of a model with one output."""

SAMPLE_WEIGHTS = "sample_weights"
"""The name of sample weights that apply to every output."""

INPUT_ALIASES = ("x",)
"""Alternative names for a model's only input in a file."""

TARGET_ALIASES = ("y", TARGETS)
"""Alternative names for the target of a model's only output in a file."""

_WEIGHT_KEY = "sample_weight"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class EvaluationDataset(Protocol):
    """Labelled examples in a fixed order. Thread-safe; can be read any number of times."""

    @property
    def name(self) -> str:
        """Its name, which is also used as a folder name."""

    @property
    def digest(self) -> str:
        """The SHA-256 that identifies its content."""

    @property
    def examples(self) -> int | None:
        """The number of examples, or None if unknown."""

    def batches(self, signature: Signature, batch_size: int) -> Iterator[Batch]:
        """Yield the examples in order in batches of ``batch_size``; the last batch may be smaller.

        Inputs are cast to the signature's dtypes within a kind or to a wider kind (float64 or uint8 to float32, but not
        float32 to int64), as Keras would.

        Raises:
            InvalidInputError: The content does not fit the signature.
        """


class ArrayDataset:
    """A dataset in memory.

    Args:
        name: Its name.
        arrays: Arrays of equal length by the names of the model's inputs (``x`` for a single one) and of its outputs
            (``y`` or ``targets`` for a single one), and optionally ``sample_weight``, ``[examples]``.

    Raises:
        ConfigurationError: The name is not a valid folder name, or the arrays are missing, empty or of different
            lengths.
    """

    def __init__(self, name: str, arrays: Arrays) -> None:
        self.name = checked_name(name)
        self._arrays = {key: as_bytes(array) for key, array in arrays.items()}
        self.examples = _common_length(name, self._arrays)
        self.digest = digest_of(self._arrays)

    def batches(self, signature: Signature, batch_size: int) -> Iterator[Batch]:
        """See `EvaluationDataset`."""
        whole = arrange(self.name, self._arrays, signature)
        for start in range(0, self.examples, batch_size):
            examples = slice(start, start + batch_size)
            yield Batch(
                inputs={key: array[examples] for key, array in whole.inputs.items()},
                targets={key: array[examples] for key, array in whole.targets.items()},
                sample_weights={key: array[examples] for key, array in whole.sample_weights.items()},
            )


def arrange(dataset: str, arrays: Arrays, signature: Signature) -> Batch:
    """Split arrays into inputs, targets and weights by the signature.

    Args:
        dataset: The name of the dataset in error messages.
        arrays: Arrays ``[examples, ...]`` under the names that `ArrayDataset` accepts.
        signature: The signature of the model.

    Raises:
        InvalidInputError: An array is missing, has another kind of dtype, or is unknown to the model.
    """
    left = dict(arrays)
    weights = {SAMPLE_WEIGHTS: left.pop(_WEIGHT_KEY)} if _WEIGHT_KEY in left else {}
    inputs = _take(dataset, left, signature.inputs, INPUT_ALIASES)
    targets = _take(dataset, left, signature.outputs, TARGET_ALIASES)
    if left:
        raise InvalidInputError(
            f"dataset {dataset!r} has arrays that are unknown to the model: {sorted(left)}; it takes "
            f"{_keys(signature.inputs, INPUT_ALIASES)} and {_keys(signature.outputs, TARGET_ALIASES)}, and "
            f"optionally {_WEIGHT_KEY!r}"
        )
    if len(targets) == 1:
        targets = {TARGETS: next(iter(targets.values()))}
    return Batch(inputs=cast_inputs(dataset, inputs, signature), targets=targets, sample_weights=weights)


def spec_for(key: str, specs: Sequence[TensorSpec], aliases: Sequence[str]) -> TensorSpec | None:
    """Return the tensor that an array of this name belongs to, or None."""
    if len(specs) == 1 and key in aliases:
        return specs[0]
    return next((spec for spec in specs if spec.name == key), None)


def load_npz(name: str, file: Path) -> ArrayDataset:
    """Read a dataset from an ``.npz`` file as `numpy.savez` writes it; see `ArrayDataset` for its keys.

    Raises:
        ConfigurationError: The file is missing, damaged, holds pickled objects, or is not a valid dataset.
    """
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as content:
            arrays = {key: content[key] for key in content.files}
    except FileNotFoundError as error:
        raise ConfigurationError(f"dataset {name!r}: there is no file {file}") from error
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigurationError(
            f"dataset {name!r}: {file} is not a readable .npz file ({error}); write it with numpy.savez, without "
            "Python objects"
        ) from error
    return ArrayDataset(name, arrays)


def cast_inputs(dataset: str, inputs: Mapping[str, Array], signature: Signature) -> dict[str, Array]:
    """Return the inputs in the dtypes of the signature.

    Raises:
        InvalidInputError: A cast would change the kind of values.
    """
    return {spec.name: _cast(dataset, spec, inputs[spec.name]) for spec in signature.inputs}


def as_bytes(array: Array) -> Array:
    """Return fixed-width text as an object array of UTF-8 bytes, and any other array unchanged."""
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    return array.astype(object) if array.dtype.kind == "S" else array


def digest_of(arrays: Arrays) -> str:
    """Return the SHA-256 of names, dtypes, shapes ``[examples, ...]`` and values, independent of the names' order."""
    digest = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        digest.update(f"{key}:{array.dtype.str}:{array.shape}:".encode())
        if array.dtype.kind == "O":
            for value in array.ravel():
                digest.update(len(value).to_bytes(8, "little") + value)
        else:
            digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


def checked_name(name: str) -> str:
    """Return the name if it is a valid folder name.

    Raises:
        ConfigurationError: It is not.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"a dataset's name is made of letters, digits, '_', '-' and '.', not {name!r}")
    return name


def _take(
    dataset: str, left: dict[str, Array], specs: Sequence[TensorSpec], aliases: Sequence[str]
) -> dict[str, Array]:
    """Remove the arrays of these tensors from ``left``, and return them."""
    came = sorted(left)
    taken = {}
    for spec in specs:
        key = next((key for key in left if spec_for(key, specs, aliases) is spec), None)
        if key is None:
            raise InvalidInputError(
                f"dataset {dataset!r} has the arrays {came}; the model also needs "
                f"{_keys((spec,), aliases if len(specs) == 1 else ())}"
            )
        taken[spec.name] = left.pop(key)
    return taken


def _cast(dataset: str, spec: TensorSpec, array: Array) -> Array:
    if spec.dtype == "string" or array.dtype.kind == "O" or array.dtype.name == spec.dtype:
        return array
    expected = _dtype(spec.dtype)
    if not np.can_cast(array.dtype, expected, casting="same_kind"):
        raise InvalidInputError(
            f"dataset {dataset!r}: input {spec.name!r} is {array.dtype.name}, the model takes {spec.dtype}"
        )
    return array.astype(expected)


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def _common_length(name: str, arrays: Arrays) -> int:
    lengths = {key: int(array.shape[0]) if array.ndim else 0 for key, array in arrays.items()}
    length = next(iter(lengths.values()), 0)
    if not length or any(other != length for other in lengths.values()):
        raise ConfigurationError(
            f"dataset {name!r}: its arrays have these numbers of examples: {lengths}; all must have the same, at "
            "least 1"
        )
    return length


def _keys(specs: Sequence[TensorSpec], aliases: Sequence[str]) -> str:
    """Describe the keys under which these tensors are looked up."""
    if len(specs) == 1:
        return " or ".join(repr(name) for name in dict.fromkeys((specs[0].name, *aliases)))
    return ", ".join(repr(spec.name) for spec in specs)
