"""A training script reduced to saving: writes one model in every format, with weights from a seed.

python saving_script.py FOLDER SEED BUILT_BEFORE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def build_model() -> Any:
    """Return a model whose layers, metrics and inputs have the names that Keras makes up."""
    x = keras.Input((4,))
    dense = layers.Dense(4, kernel_initializer=keras.initializers.HeNormal(), activation="relu")
    hidden = layers.BatchNormalization()(dense(dense(x)))
    branches = [layers.Dense(3)(hidden), layers.Dense(3)(layers.Dropout(0.5)(hidden))]
    model = keras.Model(x, layers.Dense(1, activation="sigmoid")(layers.Add()(branches)))
    model.compile("adam", keras.losses.BinaryCrossentropy(), metrics=[keras.metrics.AUC(), keras.metrics.Recall()])
    return model


def set_weights(model: Any, seed: int) -> None:
    """Give every weight a distinct value."""
    rng = np.random.default_rng(seed)
    model.set_weights([rng.uniform(0.1, 1.0, weight.shape).astype(np.float32) for weight in model.weights])


def main(folder: Path, seed: int, built_before: int) -> None:
    """Save the model."""
    for _ in range(built_before):
        build_model()
    model = build_model()
    model.optimizer.build(model.trainable_variables)
    set_weights(model, seed)
    folder.mkdir()
    for name in ("model.keras", "model.h5"):
        model.save(folder / name)
    model.save_weights(folder / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "ckpt"))
    model.export(folder / "exported", verbose=False)
    tf.saved_model.save(model, str(folder / "saved"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
