"""What models hold before their weights are loaded."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest

from understudy.checkpoints.initial_values import weights_are_loaded

INITIALIZERS = ("glorot_uniform", "he_normal", "orthogonal", "random_normal", "random_uniform", "truncated_normal")
SMALL, LARGE = (4, 4), (256, 128)


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
