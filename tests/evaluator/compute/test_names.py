from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from understudy.evaluator.compute.model_file import architecture_of, assign_weights

pytestmark = pytest.mark.usefixtures("logical_cpus")


def net(*, width: int = 4, name: str | None = None, metric: str = "accuracy") -> Any:
    x = keras.Input((6,))
    hidden = keras.layers.Dense(width, name=name)(x)
    merged = keras.layers.Add()([keras.layers.BatchNormalization()(hidden), keras.layers.Dropout(0.5)(hidden)])
    model = keras.Model(x, [keras.layers.Dense(2)(merged), keras.layers.Dense(2)(hidden)])
    model.compile(optimizer="adam", loss=["mse", "mse"], metrics=[[metric], [metric]])
    return model


def save(folder: Path, name: str, model: Any) -> Path:
    file = folder / f"{name}.keras"
    model.save(file)
    return file


def test_a_model_that_was_built_again_has_the_same_architecture(tmp_path: Path) -> None:
    first, second = net(), net()

    assert first.layers[1].name != second.layers[1].name
    one, other = save(tmp_path, "one", first), save(tmp_path, "other", second)
    assert architecture_of(one) == architecture_of(other)


def test_its_weights_load_into_the_other(tmp_path: Path) -> None:
    first, second = net(), net()
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)

    assign_weights(first, save(tmp_path, "second", second))

    for ours, theirs in zip(first(x), second(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_given_names_widths_and_metrics_tell_architectures_apart(tmp_path: Path) -> None:
    variants = {
        "base": net(),
        "wider": net(width=5),
        "named": net(name="trunk"),
        "other_metric": net(metric="mae"),
    }

    found = {architecture_of(save(tmp_path, name, model)) for name, model in variants.items()}

    assert len(found) == len(variants)


def test_which_layer_feeds_which_output_tells_architectures_apart(tmp_path: Path) -> None:
    def crossed(*, swap: bool) -> Any:
        x = keras.Input((6,))
        one, two = keras.layers.Dense(3)(x), keras.layers.Dense(3, activation="relu")(x)
        return keras.Model(x, [two, one] if swap else [one, two])

    straight, swapped = save(tmp_path, "s", crossed(swap=False)), save(tmp_path, "x", crossed(swap=True))

    assert architecture_of(straight) != architecture_of(swapped)
