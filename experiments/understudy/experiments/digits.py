"""The bundled experiment: handwritten digits."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from understudy.experiments.digits_data import Split, load_split


class Digits:
    """The bundled experiment: a small convolutional net, with BatchNorm and Dropout to cover the hard cases.

    Input ``image`` float32 ``[batch, 8, 8, 1]``, output ``digit`` float32 ``[batch, 10]`` (probabilities). About 200
    steps of the global batch reach a test accuracy of 0.98.
    """

    name = "digits"
    global_batch_size = 128

    def build_model(self) -> keras.Model:
        """Return the compiled net."""
        image = keras.Input((8, 8, 1), name="image")
        x = _convolve(image, filters=32)
        x = _convolve(x, filters=64)
        x = keras.layers.Flatten()(x)
        x = keras.layers.Dropout(0.3)(x)
        digit = keras.layers.Dense(10, activation="softmax", name="digit")(x)
        model = keras.Model(image, digit, name=self.name)
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        )
        return model

    def training_data(self) -> tf.data.Dataset:
        """Return the 1,200 training images."""
        return _dataset("train")

    def evaluation_data(self) -> Mapping[str, tf.data.Dataset]:
        """Return the 297 validation and the 300 test images."""
        return {"validation": _dataset("validation"), "test": _dataset("test")}


def _convolve(x: keras.KerasTensor, *, filters: int) -> keras.KerasTensor:
    """Apply a convolution of 3 x 3, BatchNorm, ReLU, and halve the image."""
    x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    # With Keras' momentum of 0.99 the moving statistics would lag behind a training of a few hundred steps.
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.ReLU()(x)
    return keras.layers.MaxPooling2D()(x)


def _dataset(split: Split) -> tf.data.Dataset:
    images = load_split(split)
    return tf.data.Dataset.from_tensor_slices((images.x, images.y))
