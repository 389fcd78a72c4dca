"""The evaluation datasets of a user's experiment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset import (
    SAMPLE_WEIGHTS,
    TARGETS,
    as_bytes,
    cast_inputs,
    checked_name,
    digest_of,
)
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.types import Array, Batch
from understudy.experiments import Experiment

FINGERPRINT_EXAMPLES = 256
_PARTS_WITH_WEIGHTS = 3


class ExperimentDataset:
    """A ``tf.data.Dataset`` of unbatched ``(x, y)`` or ``(x, y, sample_weight)`` examples.

    Its digest covers its element types, its length and its first 256 examples, because reading all of it would cost as
    much as scoring it.

    Args:
        name: Its name.
        examples: The dataset; the order of its examples must not change.

    Raises:
        ConfigurationError: The name is not a valid folder name, the elements have another structure, or there are
            none.
    """

    def __init__(self, name: str, examples: Any) -> None:
        self.name = checked_name(name)
        self._examples = examples
        self._check_elements()
        cardinality = int(examples.cardinality())
        self.examples: int | None = cardinality if cardinality >= 0 else None
        self.digest = self._fingerprint()

    def batches(self, signature: Signature, batch_size: int) -> Iterator[Batch]:
        """See `EvaluationDataset`."""
        for x, y, *weights in self._examples.batch(batch_size).as_numpy_iterator():
            inputs = self._named(x, signature.inputs, "inputs")
            targets = self._named(y, signature.outputs, "targets")
            yield Batch(
                inputs=cast_inputs(self.name, inputs, signature),
                targets=targets if len(signature.outputs) > 1 else {TARGETS: next(iter(targets.values()))},
                sample_weights=self._weights(weights[0], signature) if weights else {},
            )

    def _check_elements(self) -> None:
        spec = self._examples.element_spec
        if not isinstance(spec, tuple) or not 1 < len(spec) <= _PARTS_WITH_WEIGHTS:
            raise ConfigurationError(
                f"dataset {self.name!r} has elements {spec}; expected (x, y) or (x, y, sample_weight), one example each"
            )

    def _fingerprint(self) -> str:
        head = next(iter(self._examples.batch(FINGERPRINT_EXAMPLES).take(1).as_numpy_iterator()), None)
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
        """Name the leaves: by their own keys if those are the model's names, else by position."""
        leaves = _leaves(structure)
        names = [spec.name for spec in specs]
        found = dict(leaves)
        if set(found) == set(names):
            return found
        if len(leaves) != len(names):
            raise InvalidInputError(
                f"dataset {self.name!r} gives {len(leaves)} {what}, {sorted(found)}; the model: {len(names)}, {names}"
            )
        return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def datasets_of(experiment: Experiment) -> list[ExperimentDataset]:
    """Return the evaluation datasets of an experiment in its order.

    Raises:
        ConfigurationError: One of them cannot be used.
        Exception: Whatever the experiment raises.
    """
    return [ExperimentDataset(name, examples) for name, examples in experiment.evaluation_data().items()]


def _leaves(structure: Any) -> list[tuple[str, Any]]:
    """Return the leaves with the keys that lead to them joined by ``/``, in the order in which Keras flattens."""
    import keras

    return [("/".join(map(str, path)), leaf) for path, leaf in keras.tree.flatten_with_path(structure)]
