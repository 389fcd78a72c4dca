"""A model's call on flat tensors, for tracing, and the state that a trace holds as constants."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.checkpoints.signature import TensorSpec
from understudy.compat import layers_of, mask_of

Tensors = dict[str, Any]


class ModelCall:
    """Calls a model for inference, with a flat list of inputs, and returns a flat list of outputs and masks.

    Args:
        model: The model.
        interface: The structures of its inputs and outputs.

    Attributes:
        adds_losses: Whether the model added losses when it was called, besides the regularizers of its weights.
    """

    def __init__(self, model: Any, interface: ModelInterface) -> None:
        self.adds_losses = False
        self._model = model
        self._interface = interface
        self._outputs: tuple[str, ...] = ()
        self._masks: tuple[str, ...] = ()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs, then the masks of those that have one, ``[examples, ...]`` each."""
        leaves = dict(zip(self._interface.inputs.names, inputs, strict=True))
        results = self._interface.outputs.flatten(self._model(self._interface.inputs.unflatten(leaves), training=False))
        regularized = sum(variable.regularizer is not None for variable in self._model.trainable_variables)
        self.adds_losses |= len(self._model.losses) > regularized
        masks = {name: mask for name, tensor in results.items() if (mask := mask_of(tensor)) is not None}
        self._outputs, self._masks = tuple(results), tuple(masks)
        return [*(tf.identity(tensor) for tensor in results.values()), *masks.values()]

    def by_name(self, leaves: Sequence[Any]) -> tuple[Tensors, Tensors]:
        """Return the outputs and the masks by name."""
        outputs = len(self._outputs)
        return (
            dict(zip(self._outputs, leaves[:outputs], strict=True)),
            dict(zip(self._masks, leaves[outputs:], strict=True)),
        )

    def specs(self, leaves: Sequence[Any]) -> tuple[Tensors, Tensors]:
        """Return the `tf.TensorSpec`s of outputs and masks, for any number of examples."""
        outputs, masks = self.by_name([tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves])
        return outputs, masks


def tensor_spec(spec: TensorSpec) -> Any:
    """Return TensorFlow's form of a specification."""
    return tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype), name=None)


def tensor_specs(interface: ModelInterface) -> list[Any]:
    """Return TensorFlow's specifications of a model's inputs."""
    return [tensor_spec(spec) for spec in interface.inputs.specs]


class FrozenState:
    """The weights of layers that convert them when they are loaded.

    For example, `keras.layers.Normalization` computes plain tensors from its variables. A function that was traced
    before holds the earlier tensors.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [layer for layer in layers_of(model) if _converts_weights(layer)]
        self._digest = self._compute_digest()

    def changed(self) -> bool:
        """Whether the weights have changed since this object was created."""
        return self._digest != self._compute_digest()

    def _compute_digest(self) -> bytes:
        digest = hashlib.sha256()
        for layer in self._layers:
            for variable in layer.variables:
                digest.update(variable.numpy().tobytes())
        return digest.digest()


def _converts_weights(layer: Any) -> bool:
    kind = type(layer)
    loads_itself = kind.load_own_variables is not keras.Layer.load_own_variables
    return hasattr(layer, "finalize_state") or (loads_itself and not kind.__module__.startswith("keras."))
