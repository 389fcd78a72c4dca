"""What models hold before their weights are loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from testkit.resident import peak_mib
from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.model.initial_values import weights_are_loaded
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.slot import Slot

INITIALIZERS = ("glorot_uniform", "he_normal", "orthogonal", "random_normal", "random_uniform", "truncated_normal")
SMALL, LARGE = (4, 4), (256, 128)
WIDTH = 4096
WEIGHTS_MIB = 64


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        *[(name, LARGE, "float32") for name in INITIALIZERS],
        ("glorot_uniform", SMALL, "float32"),
        ("glorot_uniform", LARGE, "bfloat16"),
    ],
)
def test_random_values_that_are_replaced_at_once_are_not_drawn(name: str, shape: tuple[int, int], dtype: str) -> None:
    def zeros() -> int:
        values = keras.ops.convert_to_numpy(keras.initializers.get(name)(shape, dtype))
        assert (values.shape, values.dtype.name) == (shape, dtype)
        return int(np.sum(values == 0))

    with weights_are_loaded():
        assert zeros() == np.prod(shape)
    assert zeros() < np.prod(shape) / 2


def test_values_of_a_seed_are_drawn_all_the_same() -> None:
    drawn = keras.initializers.GlorotUniform(seed=3)((64, 64)).numpy()
    with weights_are_loaded():
        again = keras.initializers.GlorotUniform(seed=3)((64, 64)).numpy()
    np.testing.assert_array_equal(drawn, again)


def test_models_that_other_threads_build_are_not_affected() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(keras.initializers.RandomNormal()((64, 64)).numpy()))
    with weights_are_loaded():
        thread.start()
        thread.join(60)
    assert np.all(found[0] != 0)


@pytest.fixture
def wide() -> keras.Model:
    return keras.Sequential([keras.Input([WIDTH]), keras.layers.Dense(WIDTH, name="wide")])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("model.keras", ModelKind.KERAS), ("model.weights.h5", ModelKind.WEIGHTS)],
    ids=["keras", "weights"],
)
def test_building_a_model_takes_little_more_memory_than_its_weights(
    strategy: Callable[[int], Any], wide: keras.Model, tmp_path: Path, name: str, kind: ModelKind
) -> None:
    file = tmp_path / name
    (wide.save if kind is ModelKind.KERAS else wide.save_weights)(file)
    slots: list[Slot] = []

    def build() -> keras.Model:
        return keras.models.clone_model(wide)

    def load() -> None:
        slots.append(Slot(strategy(1), file, max_batch_size=8, loader=loader_for(kind, build)))

    assert peak_mib(load) < 1.5 * WEIGHTS_MIB
    example = np.eye(1, WIDTH, dtype=np.float32)
    (output,) = slots[0].forward({slots[0].signature.inputs[0].name: example}).values()
    np.testing.assert_array_equal(output[0], wide.layers[-1].kernel.numpy()[0])
