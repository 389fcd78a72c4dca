"""The model as a plain function, the same for the in-process floor and for every other server."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Forward:
    """The concrete function of a model file, from ``[rows, *row_shape]`` to ``[rows, ...]``, traced once."""

    def __init__(self, model_file: str | Path) -> None:
        import keras
        import tensorflow as tf

        model = keras.models.load_model(model_file, compile=False)
        self.row_shape: tuple[int, ...] = tuple(model.input_shape[1:])
        spec = tf.TensorSpec((None, *self.row_shape), model.inputs[0].dtype)
        self._tensor = tf.constant
        self._function = tf.function(lambda x: model(x, training=False), input_signature=[spec]).get_concrete_function()

    def __call__(self, rows: Any) -> Any:
        """Return the outputs as NumPy arrays."""
        return self._function(self._tensor(rows)).numpy()
