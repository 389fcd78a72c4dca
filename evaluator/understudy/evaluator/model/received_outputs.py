"""Outputs of a model that were computed elsewhere, in the place of its inputs and its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from understudy.checkpoints.keras_signature import ModelInterface, NamedStructure
from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.types import Arrays

_OUTPUT, _MASK = "output:", "mask:"


class ReceivedOutputs:
    """The forward pass of a scorer whose batches hold outputs and masks instead of inputs.

    Args:
        interface: The structures of the model's inputs and outputs.
        specs: The `tf.TensorSpec`s of the outputs and of the masks, by the names of the outputs.

    Attributes:
        interface: The structures of a batch to score: a flat list of outputs and masks, and the model's outputs.
    """

    def __init__(self, interface: ModelInterface, specs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
        self.output_specs = dict(specs[0]), dict(specs[1])
        received = tuple(
            TensorSpec(
                name=prefix + name,
                dtype=spec.dtype.name,
                shape=(None, *spec.shape[1:]),
            )
            for prefix, of_kind in zip((_OUTPUT, _MASK), self.output_specs, strict=True)
            for name, spec in of_kind.items()
        )
        inputs = NamedStructure(template=[spec.name for spec in received], specs=received)
        self.interface = ModelInterface(inputs=inputs, outputs=interface.outputs)

    def __call__(
        self, inputs: Mapping[str, Any], between_pieces: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the outputs and the masks that a batch holds."""
        del between_pieces
        return _with_prefix(inputs, _OUTPUT), _with_prefix(inputs, _MASK)


def as_inputs(outputs: Arrays, masks: Arrays) -> dict[str, Any]:
    """Return outputs and masks as the inputs of a batch to score."""
    return {_OUTPUT + name: array for name, array in outputs.items()} | {
        _MASK + name: array for name, array in masks.items()
    }


def _with_prefix(inputs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}
