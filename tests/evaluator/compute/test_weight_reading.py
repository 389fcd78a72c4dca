"""Weights from HDF5 files, in slices, as TensorFlow and Keras take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from understudy.evaluator.compute.weight_reading import read_in_slices

LARGE = np.random.default_rng(0).normal(size=(1111, 701)).astype(np.float32)
VALUES: dict[str, Any] = {
    "large": LARGE,
    "one row": LARGE.reshape(1, -1),
    "one axis": LARGE.ravel(),
    "double": LARGE.astype(np.float64),
    "half": LARGE.astype(np.float16),
    "small": LARGE[:3],
    "scalar": np.float32(3.5),
    "none": np.zeros((0, 4), np.float32),
    "whole numbers": np.arange(100_000),
    "truths": np.array([True, False]),
}


@pytest.mark.parametrize("storage", [{}, {"chunks": True, "compression": "gzip"}])
@pytest.mark.parametrize("name", VALUES)
def test_a_dataset_becomes_a_tensor_of_its_values(name: str, storage: dict[str, Any], tmp_path: Path) -> None:
    values = np.asarray(VALUES[name])
    with h5py.File(tmp_path / "file.h5", "w") as file:
        dataset = file.create_dataset("values", data=values, **(storage if values.size > 1 else {}))
        tensor = tf.convert_to_tensor(dataset)
    assert tensor.dtype == values.dtype
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_keras_assigns_what_a_dataset_holds(tmp_path: Path) -> None:
    variable = keras.Variable(np.zeros(LARGE.shape, np.float32))
    narrow = keras.Variable(np.zeros(LARGE.shape, np.float32), dtype="bfloat16")
    with h5py.File(tmp_path / "file.h5", "w") as file:
        dataset = file.create_dataset("values", data=LARGE)
        variable.assign(dataset)
        narrow.assign(dataset)
        dataset[:] = 0.0
    np.testing.assert_array_equal(variable.numpy(), LARGE)
    np.testing.assert_array_equal(narrow.value.numpy(), tf.cast(LARGE, tf.bfloat16).numpy())


def test_slices_are_put_together_in_memory_that_tensorflow_takes_over(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "file.h5", "w") as file:
        values = read_in_slices(file.create_dataset("values", data=LARGE))
    np.testing.assert_array_equal(values, LARGE)
    assert values.ctypes.data % 64 == 0
