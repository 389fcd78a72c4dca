"""The benchmark models and their inputs. Only building a model needs Keras."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INPUT, OUTPUT = "x", "y"
CLASSES = 10
BATCHES = (1, 32, 256)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class BenchmarkModel:
    """A model by its name.

    Attributes:
        name: The name in requests.
        text: A description.
        row_shape: The shape of one example of its single input; the output is ``[rows, 10]``.
        layers: Returns its layers, without input and output.
        serve_options: The best options of ``understudy serve`` on two cores; see docs/decisions/benchmarks.md.
    """

    name: str
    text: str
    row_shape: tuple[int, ...]
    layers: Callable[[], list[Any]]
    serve_options: tuple[str, ...] = ()

    def build(self, seed: int = 0) -> Any:
        """Return the compiled Keras model, with different weights for each seed."""
        import keras

        keras.utils.set_random_seed(seed)
        x = keras.Input(self.row_shape, name=INPUT)
        y = x
        for layer in (*self.layers(), keras.layers.Dense(CLASSES, activation="softmax", name=OUTPUT)):
            y = layer(y)
        model = keras.Model(x, y, name=self.name)
        model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def rows(self, count: int) -> Floats:
        """Return the same ``[count, ...]`` examples every time."""
        chance = np.random.default_rng(count)
        return chance.random((count, *self.row_shape), dtype=np.float32)


def _dense(*widths: int) -> Callable[[], list[Any]]:
    def layers() -> list[Any]:
        import keras

        return [keras.layers.Dense(width, activation="relu") for width in widths]

    return layers


def _conv() -> list[Any]:
    import keras

    return [
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
    ]


def _deep_conv() -> list[Any]:
    import keras

    def convolution(filters: int) -> Any:
        return keras.layers.Conv2D(filters, 3, padding="same", activation="relu")

    pooled = [keras.layers.MaxPooling2D(), convolution(64), convolution(64), keras.layers.GlobalAveragePooling2D()]
    return [convolution(32), convolution(64), *pooled]


def dense_of(mebibytes: int) -> BenchmarkModel:
    """Return an MLP of two equal hidden layers with this many MiB of weights, all used by every example."""
    weights = mebibytes * 2**20 / 4
    features = 784
    width = int((math.sqrt(features**2 + 4 * weights) - features) / 2)
    return BenchmarkModel(
        name=f"dense_{mebibytes}_mib",
        text=f"MLP {features}-{width}-{width}-{CLASSES}, {mebibytes} MiB of weights",
        row_shape=(features,),
        layers=_dense(width, width),
    )


MODELS = {
    model.name: model
    for model in (
        BenchmarkModel(
            name="mlp",
            text="MLP 784-256-256-10",
            row_shape=(784,),
            layers=_dense(256, 256),
            serve_options=("--intra-op-threads", "1", "--max-batch-size", "512"),
        ),
        BenchmarkModel(name="conv", text="conv net 28x28: 16, 32 filters", row_shape=(28, 28, 1), layers=_conv),
        BenchmarkModel(
            name="deep", text="conv net 28x28: 32, 64, 64, 64 filters", row_shape=(28, 28, 1), layers=_deep_conv
        ),
    )
}
"""The models that servers are checked with; ``deep`` is heavy enough that the wire counts for little."""


def model_named(name: str) -> BenchmarkModel:
    """Return a model of `MODELS` or of `dense_of` by its name."""
    if name.startswith("dense_"):
        return dense_of(int(name.split("_")[1]))
    return MODELS[name]


def model_file(folder: Path, name: str, seed: int = 0) -> Path:
    """Return the path where ``programs/prepare.py`` saves a model."""
    return folder / f"{name}_{seed}.keras"
