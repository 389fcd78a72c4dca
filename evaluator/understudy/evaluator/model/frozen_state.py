"""State that traced functions hold as constants, although a checkpoint can change it."""

from __future__ import annotations

import hashlib
from typing import Any

import keras

from understudy.compat import layers_of


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
