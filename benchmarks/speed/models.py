"""The benchmark models and their inputs. Only building a model needs Keras."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.speed import networks

INPUT, OUTPUT = "x", "y"
CLASSES = 10
BATCHES = (1, 32, 256)

Floats = npt.NDArray[np.float32]

_KERAS_DTYPES = {"FP32": "float32", "INT32": "int32", "BYTES": "string"}


@dataclass(frozen=True, kw_only=True)
class BenchmarkModel:
    """A model by its name.

    Attributes:
        name: The name in requests.
        text: A description.
        row_shape: The shape of one example of its single input.
        layers: Takes ``keras.layers``; returns its layers, without input and output; the output is ``[rows, 10]``.
        network: Takes ``keras.layers`` and the input; returns the output, ``[rows, *output_shape]``, instead of layers.
        output_shape: The shape of one example of its single output.
        datatype: The Open Inference Protocol's name of the input's type.
        has_open_axis: Whether axis 1 of the input may have any length.
        batches: The batch sizes that its answers are checked with.
        serve_options: The best options of ``understudy serve`` on two cores; see docs/decisions/benchmarks.md.
    """

    name: str
    text: str
    row_shape: tuple[int, ...]
    layers: Callable[[Any], list[Any]] = lambda _: []
    network: Callable[[Any, Any], Any] | None = None
    output_shape: tuple[int, ...] = (CLASSES,)
    datatype: str = "FP32"
    has_open_axis: bool = False
    batches: tuple[int, ...] = BATCHES
    serve_options: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """The shape of one example in the model's signature."""
        return (None, *self.row_shape[1:]) if self.has_open_axis else self.row_shape

    def build(self, seed: int = 0) -> Any:
        """Return the compiled Keras model, with different weights for each seed."""
        import keras

        keras.utils.set_random_seed(seed)
        x = keras.Input(self.input_shape, dtype=_KERAS_DTYPES[self.datatype], name=INPUT)
        if self.network is not None:
            return keras.Model(x, self.network(keras.layers, x), name=self.name)
        y = x
        for layer in (*self.layers(keras.layers), keras.layers.Dense(CLASSES, activation="softmax", name=OUTPUT)):
            y = layer(y)
        model = keras.Model(x, y, name=self.name)
        model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def rows(self, count: int) -> npt.NDArray[Any]:
        """Return the same ``[count, ...]`` examples every time."""
        chance = np.random.default_rng(count)
        if self.datatype != "FP32":
            ids = chance.integers(networks.VOCABULARY, size=(count, *self.row_shape), dtype=np.int32)
            return ids if self.datatype == "INT32" else networks.texts(ids)
        return chance.random((count, *self.row_shape), dtype=np.float32)


def _dense(*widths: int) -> Callable[[Any], list[Any]]:
    return lambda layers: [layers.Dense(width, activation="relu") for width in widths]


def _convolution(layers: Any, filters: int) -> Any:
    return layers.Conv2D(filters, 3, padding="same", activation="relu")


def _conv(layers: Any) -> list[Any]:
    first, second = (_convolution(layers, filters) for filters in (16, 32))
    return [first, layers.MaxPooling2D(), second, layers.MaxPooling2D(), layers.Flatten()]


def _deep_conv(layers: Any) -> list[Any]:
    first, second, third, fourth = (_convolution(layers, filters) for filters in (32, 64, 64, 64))
    return [first, second, layers.MaxPooling2D(), third, fourth, layers.GlobalAveragePooling2D()]


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


def _real(name: str, text: str, row_shape: tuple[int, ...], **more: Any) -> BenchmarkModel:
    return BenchmarkModel(
        name=name, text=text, row_shape=row_shape, network=getattr(networks, name), batches=(1, 8), **more
    )


REAL_MODELS = {
    model.name: model
    for model in (
        _real("mobilenet", "MobileNetV2, 96 pixels, alpha 0.5", (96, 96, 3)),
        _real("text", "text classifier on strings", (1,), datatype="BYTES"),
        _real("transformer", "transformer, 64 of any number of tokens", (64,), datatype="INT32", has_open_axis=True),
        _real("lstm", "LSTM of 64 units, 32 steps", (32, 16)),
        _real("tabular", "tabular net with lookups of 8 categories", (8,), datatype="BYTES"),
        _real("unet", "U-Net, 64 pixels", (64, 64, 1), output_shape=(64, 64, 1)),
    )
}
"""The models that are served without any option."""


def model_named(name: str) -> BenchmarkModel:
    """Return a model of `MODELS`, `REAL_MODELS` or `dense_of` by its name."""
    if name.startswith("dense_"):
        return dense_of(int(name.split("_")[1]))
    return (MODELS | REAL_MODELS)[name]


def model_file(folder: Path, name: str, seed: int = 0) -> Path:
    """Return the path where ``programs/prepare.py`` saves a model."""
    return folder / f"{name}_{seed}.keras"
