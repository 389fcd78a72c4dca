"""A third-party script: stock Keras and TensorFlow, saving one step after another, without Understudy.

    python stock_script.py

For every line ``FORMAT FOLDER SECONDS`` on stdin it saves for that long, as fast as possible, then prints as JSON the
number of saves, of failed saves, and the last step. All weights of step N are `weight_of(N)`, so that a mixture of two
steps cannot look like one.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WIDTH = 256
KEPT = 2

Save = Callable[[Any, int], None]


def weight_of(step: int) -> float:
    """Return a number that differs strongly between steps."""
    return (step * 7919 % 1000 + 1) / 1000


def build_model() -> Any:
    """Return a compiled model of two layers, 0.5 MB."""
    x = keras.Input((WIDTH,), name="x")
    hidden = keras.layers.Dense(WIDTH, use_bias=False)(x)
    model = keras.Model(x, keras.layers.Dense(WIDTH, use_bias=False, name="y")(hidden))
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    return model


def model_checkpoint(name: str, **options: Any) -> Callable[[Any, Path], Save]:
    """Save with `ModelCheckpoint`, repeatedly to one path."""

    def make(model: Any, folder: Path) -> Save:
        callback = keras.callbacks.ModelCheckpoint(str(folder / name), **options)
        callback.set_model(model)
        return lambda _, step: callback.on_epoch_end(step, {})

    return make


def checkpoint_manager(model: Any, folder: Path) -> Save:
    """Save with a manager that deletes all but the last two."""
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=KEPT)
    return lambda _, step: manager.save(step)


def numbered_saved_models(_: Any, folder: Path) -> Save:
    """Export for TensorFlow Serving and delete all but the last two."""

    def save(model: Any, step: int) -> None:
        model.export(folder / str(step), verbose=False)
        numbers = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
        for old in numbers[:-KEPT]:
            shutil.rmtree(old)

    return save


def one_saved_model(_: Any, folder: Path) -> Save:
    """Overwrite one SavedModel repeatedly."""
    return lambda model, _: tf.saved_model.save(model, str(folder / "ckpt-1"))


WRITERS: Mapping[str, Callable[[Any, Path], Save]] = {
    "keras": model_checkpoint("model.keras"),
    "weights_h5": model_checkpoint("model.weights.h5", save_weights_only=True),
    "h5": model_checkpoint("model.h5"),
    "checkpoint_manager": checkpoint_manager,
    "saved_model_numbered": numbered_saved_models,
    "saved_model_overwritten": one_saved_model,
}


def write(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Save one step after another in one format; return the counts."""
    model = build_model()
    model.optimizer.build(model.trainable_variables)
    save = WRITERS[name](model, folder)
    failures = []
    step = 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        step += 1
        model.optimizer.iterations.assign(step)
        model.set_weights([np.full(weight.shape, weight_of(step), np.float32) for weight in model.weights])
        try:
            save(model, step)
        except Exception as error:  # noqa: BLE001 - any failure of a save is a result
            failures.append(repr(error))
    return {"saves": step, "failures": failures, "last_step": step}


def main() -> None:
    """Process the input line by line."""
    for line in sys.stdin:
        name, folder, seconds = line.split()
        print(json.dumps(write(name, Path(folder), float(seconds))), flush=True)


if __name__ == "__main__":
    main()
