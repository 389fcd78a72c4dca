"""Weights from HDF5 files and archives, as Keras and TensorFlow take them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.loaders import keras_files as files
from understudy.evaluator.model.weights import ZeroCopyArray, assign_from_hdf5

FEATURES, WIDTH = 301, 70
"""Enough for a kernel of the model to be read straight from the file, and its bias not."""


def _model(seed: int, dtype: str = "float32") -> Any:
    keras.utils.set_random_seed(seed)
    x = keras.Input((FEATURES,), name="x")
    y = keras.layers.Dense(WIDTH, dtype=dtype, bias_initializer="uniform")(x)
    return keras.Model(x, keras.layers.BatchNormalization(dtype=dtype)(y))


def _values(model: Any) -> list[Any]:
    return [np.asarray(value) for value in model.get_weights()]


def _assert_same(found: Any, expected: Any) -> None:
    for left, right in zip(_values(found), _values(expected), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_model_gets_the_weights_of_a_file(dtype: str, tmp_path: Path) -> None:
    written, model = _model(1, dtype), _model(2, dtype)
    written.save_weights(tmp_path / "model.weights.h5")
    assign_from_hdf5(model, tmp_path / "model.weights.h5")
    _assert_same(model, written)


def test_values_are_cast_to_what_the_variables_hold(tmp_path: Path) -> None:
    written, model = _model(1), _model(2, "bfloat16")
    written.save_weights(tmp_path / "model.weights.h5")
    assign_from_hdf5(model, tmp_path / "model.weights.h5")
    expected = tf.cast(written.get_weights()[0], tf.bfloat16)
    np.testing.assert_array_equal(model.get_weights()[0], expected.numpy())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_model_gets_the_weights_in_an_archive(compression: int, tmp_path: Path) -> None:
    written, model = _model(1), _model(2)
    written.save(tmp_path / "written.keras")
    with (
        zipfile.ZipFile(tmp_path / "written.keras") as source,
        zipfile.ZipFile(tmp_path / "model.keras", "w", compression) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    files.assign_weights(model, tmp_path / "model.keras")
    _assert_same(model, written)


@pytest.mark.parametrize("options", [{"chunks": True, "compression": "gzip"}, {"chunks": True}, {"dtype": ">f4"}, {}])
def test_it_does_not_matter_how_values_are_stored(options: dict[str, Any], tmp_path: Path) -> None:
    written, model = _model(1), _model(2)
    written.save_weights(tmp_path / "whole.weights.h5")
    with h5py.File(tmp_path / "whole.weights.h5") as source, h5py.File(tmp_path / "model.weights.h5", "w") as target:
        _copy_with(options, source, target)
    assign_from_hdf5(model, tmp_path / "model.weights.h5")
    _assert_same(model, written)


@pytest.mark.filterwarnings("ignore:Skipping nested container")  # Keras looks for the layer in two places
def test_weights_of_another_shape_are_refused_with_the_name_of_the_layer(tmp_path: Path) -> None:
    x = keras.Input((FEATURES,))
    keras.Model(x, keras.layers.Dense(WIDTH + 1)(x)).save_weights(tmp_path / "model.weights.h5")
    model = keras.Model(x, keras.layers.Dense(WIDTH, name="narrow")(x))
    with pytest.raises(ValueError, match="narrow: The shape of the target variable"):
        assign_from_hdf5(model, tmp_path / "model.weights.h5")


def test_a_model_that_is_not_built_gets_no_weights(tmp_path: Path) -> None:
    _model(1).save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="build it"):
        assign_from_hdf5(keras.Sequential([keras.layers.Dense(WIDTH)]), tmp_path / "model.weights.h5")


def test_weights_that_end_early_are_refused(tmp_path: Path) -> None:
    written = _model(1)
    written.save(tmp_path / "model.keras")
    content = (tmp_path / "model.keras").read_bytes()
    begin = content.index(np.ascontiguousarray(written.get_weights()[0]).tobytes())
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        directory = content[archive.start_dir :]
    (tmp_path / "model.keras").write_bytes(content[: begin + 2**16] + directory)
    with pytest.raises(LoadError):
        files.assign_weights(_model(2), tmp_path / "model.keras")


@pytest.mark.parametrize(
    ("part", "is_checkpoint_over"),
    [(lambda array: array, True), (lambda array: array[1:], False), (lambda array: array.T, False)],
)
def test_values_are_taken_over_only_where_their_memory_suits_tensorflow(
    part: Callable[[Any], Any],
    is_checkpoint_over: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    buffer = np.zeros(64 * 67 * 4 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    values = buffer[start : start + 64 * 67 * 4].view(np.float32).reshape(64, 67).view(ZeroCopyArray)
    values[:] = np.arange(64 * 67).reshape(64, 67)
    given = part(values)
    tensor = tf.convert_to_tensor(given)
    np.testing.assert_array_equal(tensor.numpy(), np.array(given))
    assert given.flags.writeable != is_checkpoint_over


def test_what_was_taken_over_cannot_be_changed() -> None:
    buffer = np.zeros(2**16 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    values = buffer[start : start + 2**16].view(np.float32).view(ZeroCopyArray)
    tensor = tf.convert_to_tensor(values)
    with pytest.raises(ValueError, match="read-only"):
        values += 1.0
    assert not tensor.numpy().any()


def _copy_with(options: dict[str, Any], source: Any, target: Any) -> None:
    def copy(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group):
            target.require_group(name).attrs.update(item.attrs)
        elif item.ndim:
            target.create_dataset(name, data=item[()], **options)
        else:
            target.create_dataset(name, data=item[()])

    source.visititems(copy)
