"""A typical training script: Keras, ``fit`` and ``ModelCheckpoint``, without Understudy.

It learns scikit-learn's handwritten digits under MirroredStrategy on two logical CPUs and writes one checkpoint per
epoch. ``understudy demo --script`` runs it beside the service.

    python plain_keras_script.py CHECKPOINT_FOLDER EPOCHS
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def two_replicas() -> tf.distribute.MirroredStrategy:
    """Split the CPU in two, as if there were two GPUs."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def compiled_model() -> keras.Model:
    """A small network for 8x8 images."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ],
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(folder: Path, epochs: int) -> None:
    """Train and write ``folder/digits-<epoch>.keras`` after every epoch."""
    strategy = two_replicas()
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    batch = 64
    rows = len(images) * 4 // 5 // batch * batch
    training = tf.data.Dataset.from_tensor_slices((images[:rows], digits.target[:rows]))
    training = training.cache().shuffle(rows, seed=1).batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    with strategy.scope():
        model = compiled_model()
    checkpoint = keras.callbacks.ModelCheckpoint(str(folder / "digits-{epoch:03d}.keras"))
    model.fit(training, epochs=epochs, callbacks=[checkpoint], verbose=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
