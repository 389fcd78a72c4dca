"""Evaluation datasets: the interface, those held in memory or in an ``.npz`` file, and those of an experiment."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.types import Array, Arrays, Batch
from understudy.experiments import Experiment, example_arrays
from understudy.experiments.experiment_data import evaluation_data
from understudy.experiments.experiment_errors import ExampleError

TARGETS = "targets"
"""The name of the targets of a model with one output."""

SAMPLE_WEIGHTS = "sample_weights"
"""The name of sample weights that apply to every output."""

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

    @property
    def columns(self) -> frozenset[str] | None:
        """The names that its examples have for their parts; None if a slice may know them by names of the model."""

    def batches(self, signature: Signature, batch_size: int) -> Iterator[Batch]:
        """Yield the examples in order in batches of ``batch_size``; the last batch may be smaller.

        Inputs are cast to the signature's dtypes within a kind or to a wider kind (float64 or uint8 to float32, but not
        float32 to int64), as Keras would.

        Raises:
            InvalidInputError: The content does not fit the signature.
        """


class SeekableDataset(EvaluationDataset, Protocol):
    """A dataset that can be read from any example on."""

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        """See `EvaluationDataset`; begins with the example at this place."""


class ArrayDataset:
    """A dataset in memory.

    Args:
        name: Its name.
        arrays: Arrays of equal length under the keys of `understudy.experiments.example_arrays`.
        features: The names of features that slices need and the model may not take.
        inputs_only: Whether all other arrays are ignored, so that there need be no targets.

    Raises:
        ConfigurationError: The name is not a valid folder name, or the arrays are missing, empty or of different
            lengths.
    """

    def __init__(self, name: str, arrays: Arrays, *, features: Collection[str] = (), inputs_only: bool = False) -> None:
        self.name = checked_name(name)
        self._features = frozenset(features)
        self._inputs_only = inputs_only
        self._arrays = {key: as_bytes(array) for key, array in arrays.items()}
        self.examples = _common_length(name, self._arrays)
        self.digest = digest_of(self._arrays)
        self.columns = columns_of_arrays({key: array.ndim == 1 for key, array in self._arrays.items()})

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        """See `SeekableDataset`."""
        whole = arrange(self.name, self._arrays, signature, features=self._features, inputs_only=self._inputs_only)
        for start in range(first_example, self.examples, batch_size):
            examples = slice(start, start + batch_size)
            yield Batch(
                inputs={key: array[examples] for key, array in whole.inputs.items()},
                targets={key: array[examples] for key, array in whole.targets.items()},
                sample_weights={key: array[examples] for key, array in whole.sample_weights.items()},
                features={key: array[examples] for key, array in whole.features.items()},
            )


def columns_of_arrays(has_one_value: Mapping[str, bool]) -> frozenset[str] | None:
    """Return `EvaluationDataset.columns` of arrays.

    Args:
        has_one_value: Whether each array has a single value for an example, by its key.
    """
    renamed = [key for key in has_one_value if example_arrays.is_renamed(key)]
    if any(has_one_value[key] for key in renamed):
        return None
    return frozenset(has_one_value.keys() - set(renamed) - {example_arrays.WEIGHT_KEY})


def arrange(
    dataset: str,
    arrays: Arrays,
    signature: Signature,
    *,
    features: Collection[str] = (),
    inputs_only: bool = False,
) -> Batch:
    """Split arrays into inputs, targets, weights and features by the signature.

    Args:
        dataset: The name of the dataset in error messages.
        arrays: Arrays ``[examples, ...]`` under the keys that `ArrayDataset` accepts.
        signature: The signature of the model.
        features: The names of features that the model may not take.
        inputs_only: Whether to ignore all other arrays.

    Raises:
        InvalidInputError: An array is missing, has another kind of dtype, or is unknown to the model.
    """
    try:
        if inputs_only:
            inputs = example_arrays.find_inputs(f"dataset {dataset!r}", arrays, signature.inputs)
            return Batch(inputs=inputs, targets={})
        found = example_arrays.find_examples(
            f"dataset {dataset!r}", arrays, signature.inputs, signature.outputs, features=features
        )
    except ExampleError as error:
        raise InvalidInputError(str(error)) from error
    return Batch(
        inputs=found.inputs,
        targets=_as_targets(found.targets, signature),
        sample_weights={} if found.sample_weight is None else {SAMPLE_WEIGHTS: found.sample_weight},
        features=found.features,
    )


def _as_targets(found: Arrays, signature: Signature) -> Arrays:
    """Return targets by the names that a `Batch` has for them."""
    return dict(found) if len(signature.outputs) > 1 else dict(zip([TARGETS], found.values(), strict=False))


def load_npz(name: str, file: Path, *, features: Collection[str] = ()) -> ArrayDataset:
    """Read a dataset from an ``.npz`` file as `numpy.savez` writes it; see `ArrayDataset` for its keys.

    Raises:
        ConfigurationError: The file is missing, damaged, holds pickled objects, or is not a valid dataset.
    """
    try:
        arrays = example_arrays.read_arrays(file)
    except FileNotFoundError as error:
        raise ConfigurationError(f"dataset {name!r}: there is no file {file}") from error
    except ExampleError as error:
        raise ConfigurationError(f"dataset {name!r}: {error}") from error
    return ArrayDataset(name, arrays, features=features)


def cast_inputs(dataset: str, inputs: Mapping[str, Array], signature: Signature) -> dict[str, Array]:
    """Return the inputs in the dtypes of the signature.

    Raises:
        InvalidInputError: A cast would change the kind of values.
    """
    try:
        return example_arrays.cast_inputs(f"dataset {dataset!r}", inputs, signature.inputs)
    except ExampleError as error:
        raise InvalidInputError(str(error)) from error


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


def _common_length(name: str, arrays: Arrays) -> int:
    try:
        return example_arrays.common_length(f"dataset {name!r}", arrays)
    except ExampleError as error:
        raise ConfigurationError(str(error)) from error


FINGERPRINT_EXAMPLES = 256
_OTHER_SHAPE = re.compile(r"First element had shape (\[.*?\]) and element \d+ had shape (\[.*?\])")
_PARTS_WITH_WEIGHTS = 3
_INPUTS = "inputs"
_IF_BATCHES = "if they are batches, make examples of them with dataset.unbatch()"


class ExperimentDataset:
    """A ``tf.data.Dataset`` of unbatched examples: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.

    Its digest covers its element types, its length and its first 256 examples, because reading all of it would cost as
    much as scoring it.

    Args:
        name: Its name.
        examples: The dataset; the order of its examples must not change.
        features: The names of features that slices need and the model may not take; ``x`` may have them by name.

    Raises:
        ConfigurationError: The name is not a valid folder name, the elements have another structure, or there are
            none, or infinitely many.
    """

    def __init__(self, name: str, examples: Any, *, features: Collection[str] = ()) -> None:
        self.name = checked_name(name)
        self._examples = examples
        self._features = frozenset(features)
        self._check_elements()
        self.examples = self._count()
        self.digest = self._fingerprint()
        self.columns = self._columns()

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        """See `SeekableDataset`."""
        for x, *labels in map(parts_of, self._read(batch_size, first_example)):
            inputs, features = self._split(x, signature)
            self._check_single(inputs, signature)
            targets, *weights = labels or [{}]
            yield Batch(
                inputs=cast_inputs(self.name, inputs, signature),
                targets=_as_targets(self._named(targets, signature.outputs, "targets"), signature),
                sample_weights=self._weights(weights[0], signature) if weights else {},
                features=features,
            )

    def _read(self, batch_size: int, first_example: int = 0) -> Iterator[Any]:
        import tensorflow as tf

        try:
            yield from self._examples.skip(first_example).batch(batch_size).as_numpy_iterator()
        except tf.errors.InvalidArgumentError as error:
            found = _OTHER_SHAPE.search(error.message)
            if found is None:
                raise
            raise InvalidInputError(
                f"dataset {self.name!r} has examples of shapes {found[1]} and {found[2]} in one batch; one shape was "
                f"expected: pad the examples, and give the padding a sample weight of 0; {_IF_BATCHES}"
            ) from error

    def _count(self) -> int | None:
        import tensorflow as tf

        cardinality = int(self._examples.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            raise ConfigurationError(
                f"dataset {self.name!r} repeats without end; each example is scored once: leave out repeat(), or end "
                "it with take(n)"
            )
        return cardinality if cardinality >= 0 else None

    def _check_single(self, inputs: Arrays, signature: Signature) -> None:
        """Refuse elements that have an axis more than an example of the model."""
        for spec in signature.inputs:
            element = inputs[spec.name].shape[1:]
            if len(element) == len(spec.shape):
                expected = ", ".join("any" if length is None else str(length) for length in spec.shape[1:])
                raise InvalidInputError(
                    f"dataset {self.name!r} has elements with the input {spec.name!r} of the shape {list(element)}; "
                    f"[{expected}] was expected, one example each: {_IF_BATCHES}"
                )

    def _split(self, x: Any, signature: Signature) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the inputs and the features that only slices need, by name."""
        leaves = dict(_leaves(x))
        names = {spec.name for spec in signature.inputs}
        more = (
            (leaves.keys() - names) & {*self._features, example_arrays.EXAMPLE_KEY} if names <= leaves.keys() else set()
        )
        inputs = {name: leaf for name, leaf in leaves.items() if name not in more} if more else x
        return self._named(inputs, signature.inputs, _INPUTS), {name: leaves[name] for name in sorted(more)}

    def _check_elements(self) -> None:
        import tensorflow as tf

        spec = parts_of(self._examples.element_spec)
        if not 1 <= len(spec) <= _PARTS_WITH_WEIGHTS:
            raise ConfigurationError(
                f"dataset {self.name!r} has elements {spec}; expected x, (x, y) or (x, y, sample_weight), one example "
                "each"
            )
        for what, part in zip(("x", "y", "sample_weight"), spec, strict=False):
            for path, leaf in _leaves(part):
                if not isinstance(leaf, tf.TensorSpec):
                    place = f"{what}[{path!r}]" if path else what
                    raise ConfigurationError(
                        f"dataset {self.name!r} has {place} of {leaf}; a dense tensor was expected: "
                        f"{_remedy(what, is_sparse=isinstance(leaf, tf.SparseTensorSpec))}"
                    )

    def _columns(self) -> frozenset[str] | None:
        x = parts_of(self._examples.element_spec)[0]
        leaves = dict(_leaves(x))
        if isinstance(x, Mapping):
            return frozenset(leaves)
        return None if any(spec.shape.rank in {0, None} for spec in leaves.values()) else frozenset()

    def _fingerprint(self) -> str:
        try:
            head = next(self._read(FINGERPRINT_EXAMPLES), None)
        except InvalidInputError as error:
            raise ConfigurationError(str(error)) from error
        if head is None:
            raise ConfigurationError(f"dataset {self.name!r} is empty; give at least one example")
        content = digest_of({path: as_bytes(np.asarray(leaf)) for path, leaf in _leaves(head)})
        return hashlib.sha256(f"{content}:{self.examples}:{self._examples.element_spec}".encode()).hexdigest()

    def _weights(self, structure: Any, signature: Signature) -> dict[str, Array]:
        leaves = _leaves(structure)
        if len(leaves) == 1:
            return {SAMPLE_WEIGHTS: leaves[0][1]}
        return self._named(structure, signature.outputs, "sample weights")

    def _named(self, structure: Any, specs: Sequence[TensorSpec], what: str) -> dict[str, Array]:
        """Name the leaves: by their own keys if those are the model's names, else by position.

        The labels of some outputs may be missing if the others have names.
        """
        leaves = _leaves(structure)
        names = [spec.name for spec in specs]
        found = dict(leaves)
        if set(found) == set(names) or (what != _INPUTS and set(found) <= set(names)):
            return found
        if len(leaves) != len(names):
            raise InvalidInputError(
                f"dataset {self.name!r} gives {len(leaves)} {what}, {sorted(found)}; the model: {len(names)}, {names}"
            )
        return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


class SavedDataset(ExperimentDataset):
    """A dataset that is read from a folder for each evaluation. Its digest covers all files.

    Args:
        name: Its name.
        examples: The loaded dataset.
        folder: The folder.
        features: See `ExperimentDataset`.

    Raises:
        ConfigurationError: The name is not a valid folder name, the elements have another structure, or there are
            none.
    """

    def __init__(self, name: str, examples: object, folder: Path, *, features: Collection[str] = ()) -> None:
        super().__init__(name, examples, features=features)
        self._folder = folder
        self.digest = _digest_of(folder)

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        """See `SeekableDataset`."""
        import tensorflow as tf

        try:
            yield from super().batches(signature, batch_size, first_example=first_example)
        except tf.errors.OpError as error:
            raise ConfigurationError(
                f"dataset {self.name!r}: {self._folder} was changed or damaged since it was opened: {first_line(error)}"
            ) from error


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()}:{content}\n".encode())
    return digest.hexdigest()


def datasets_of(experiment: Experiment, *, features: Collection[str] = ()) -> list[ExperimentDataset]:
    """Return the evaluation datasets of an experiment in its order.

    Raises:
        ConfigurationError: One of them cannot be used.
        ExperimentError: The experiment's code raises, or returns something else.
    """
    return [
        ExperimentDataset(name, examples, features=features) for name, examples in evaluation_data(experiment).items()
    ]


def parts_of(element: Any) -> tuple[Any, ...]:
    """Return ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``; as in Keras, what is no tuple is ``x``."""
    return element if isinstance(element, tuple) else (element,)


def _leaves(structure: Any) -> list[tuple[str, Any]]:
    """Return the leaves with the keys that lead to them joined by ``/``, in the order in which Keras flattens."""
    import keras

    return [("/".join(map(str, path)), leaf) for path, leaf in keras.tree.flatten_with_path(structure)]


def _remedy(part: str, *, is_sparse: bool) -> str:
    """Say how to make a part of an element, ``x``, ``y`` or ``sample_weight``, dense."""
    if is_sparse:
        return "make one of it with tf.sparse.to_dense()"
    if part == "x":
        return (
            "pad a ragged one with to_tensor(), but only for a model that masks the padding; for one with a ragged "
            "input, send batches of one length each ('understudy evaluate')"
        )
    return "pad a ragged one with to_tensor(), and give the padding a sample weight of 0"
