"""The examples that commands send, from files, and the files that commands write.

`understudy.experiments.example_arrays` says under which keys arrays are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from understudy.cli.command_errors import CommandError, written
from understudy.experiments.example_arrays import FoundExamples, find_examples, find_inputs, portable, read_arrays
from understudy.experiments.experiment_errors import ExampleError
from understudy.wire.dtypes import fixed_size_dtype

if TYPE_CHECKING:
    from understudy.clients import ModelMetadata, TensorSpec

Array = npt.NDArray[Any]

T = TypeVar("T")

LARGEST_REQUEST_BYTES: Final = 8 << 20
"""What a request of several examples may hold, and its answer: half of what a server takes by default."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Arrays ``[examples, ...]`` by name. Targets have the outputs' names; weights are ``[examples]``.

    Attributes:
        inputs: All inputs of the model.
        targets: The targets of those outputs that have any.
        sample_weight: The weights; None without.
        features: The features that the model does not take.
        outputs: How many outputs the model has.
        answer_bytes: The size of the answer for one example, as far as it is known.
    """

    inputs: Mapping[str, Array]
    targets: Mapping[str, Array]
    sample_weight: Array | None = None
    features: Mapping[str, Array] = field(default_factory=dict)
    outputs: int = 1
    answer_bytes: int = 0

    @property
    def count(self) -> int:
        """The length of axis 0."""
        return len(next(iter(self.inputs.values())))

    def inputs_by(self, batch_size: int) -> Iterator[Mapping[str, Array]]:
        """Yield the inputs in order in batches of this size, or of as many examples as a request may hold."""
        for examples in self._slices(batch_size):
            yield _sliced(self.inputs, examples)

    def batches_of(self, batch_size: int) -> Iterator[tuple[Any, ...]]:
        """Yield ``(inputs, targets, weights, features)`` in batches as `inputs_by`; targets and weights may be None."""
        lone_target = next(iter(self.targets.values()), None) if self.outputs == 1 else None
        for examples in self._slices(batch_size):
            targets = _sliced(self.targets, examples) or None if lone_target is None else lone_target[examples]
            weights = None if self.sample_weight is None else self.sample_weight[examples]
            yield _sliced(self.inputs, examples), targets, weights, _sliced(self.features, examples)

    def _slices(self, batch_size: int) -> Iterator[slice]:
        arrays = (*self.inputs.values(), *self.targets.values(), *self.features.values())
        each = max(1, self.answer_bytes, sum(array.nbytes for array in arrays) // max(1, self.count))
        size = max(1, min(batch_size, LARGEST_REQUEST_BYTES // each))
        return (slice(start, start + size) for start in range(0, self.count, size))


def examples_to_predict(file: Path, metadata: ModelMetadata) -> Examples:
    """Return the model's inputs from a ``.npy`` or ``.npz`` file; other arrays in it are ignored.

    Raises:
        CommandError: The file cannot be read, or its arrays do not fit the model.
    """

    def find() -> dict[str, Array]:
        return find_inputs(str(file), read_arrays(file), metadata.inputs)

    return to_predict(_reported(find, file), metadata.outputs)


def to_predict(inputs: Mapping[str, Array], outputs: Sequence[TensorSpec]) -> Examples:
    """Return inputs as examples to send to a model with these outputs."""
    return Examples(inputs=inputs, targets={}, answer_bytes=sum(map(_bytes_of_example, outputs)))


def examples_to_score(file: Path, metadata: ModelMetadata, slices: Sequence[str] = ()) -> Examples:
    """Return the model's inputs, and the targets and weights if any, from an ``.npz`` file.

    Features that slices name may be there in addition.

    Raises:
        CommandError: The file cannot be read, or its arrays do not fit the model.
    """

    def find() -> FoundExamples:
        named = _features_of(slices) if slices else ()
        return find_examples(str(file), read_arrays(file), metadata.inputs, metadata.outputs, features=named)

    found = _reported(find, file)
    return Examples(
        inputs=found.inputs,
        targets=found.targets,
        sample_weight=found.sample_weight,
        features=found.features,
        outputs=len(metadata.outputs),
    )


def _bytes_of_example(output: TensorSpec) -> int:
    """Return the size of an output for one example; 0 for texts and if an axis is open."""
    axes = [length for length in output.shape[1:] if length is not None]
    is_known = output.dtype != "string" and len(axes) == len(output.shape) - 1
    return fixed_size_dtype(output.dtype).itemsize * math.prod(axes) if is_known else 0


def _features_of(slices: Sequence[str]) -> list[str]:
    from understudy.evaluator.evaluation.slices import parse_slices

    return [feature.name for setting in parse_slices(slices) for feature in setting.features]


def write_npz(file: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as `numpy.savez` does; bfloat16, which the format lacks, becomes float32, bytes fixed-width."""
    stored = {name: portable(array) for name, array in arrays.items()}
    with written(file), file.open("wb") as sink:
        np.savez(sink, allow_pickle=False, **stored)


def _reported(find: Callable[[], T], file: Path) -> T:
    try:
        return find()
    except FileNotFoundError as error:
        raise CommandError(f"there is no file {file}") from error
    except ExampleError as error:
        raise CommandError(str(error)) from error


def _sliced(arrays: Mapping[str, Array], examples: slice) -> dict[str, Array]:
    return {name: array[examples] for name, array in arrays.items()}
