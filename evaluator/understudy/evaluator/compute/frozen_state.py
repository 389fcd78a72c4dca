"""State that traced functions hold as constants although a checkpoint can change it."""

from __future__ import annotations

import hashlib
from typing import Any

import keras


class FrozenState:
    """The weights of layers that turn them into something else when they are loaded.

    `keras.layers.Normalization`, for one, computes plain tensors from its variables. A function traced before holds the
    tensors of that time.
    """

    def __init__(self, model: Any) -> None:
        layers = model._flatten_layers()  # noqa: SLF001 - the only way to layers within layers
        self._layers = [layer for layer in layers if _converts_weights(layer)]
        self._digest = self._compute_digest()

    def changed(self) -> bool:
        """Whether the weights differ from what they were when this object was made."""
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
