from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from understudy.experiments import ExperimentError
from understudy.experiments.arrays import array_examples, open_array

ROWS = 10


def write(folder: Path, name: str, array: Any) -> Path:
    path = folder / name
    np.save(path, array)
    return path


def test_files_are_one_array_after_the_other(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(size=(ROWS, 2, 3)).astype(np.float32)
    paths = [write(tmp_path, f"{index}.npy", part) for index, part in enumerate((whole[:4], whole[4:5], whole[5:]))]
    array = open_array(*paths)
    assert (array.shape, array.dtype) == (whole.shape, whole.dtype)
    rows = np.array([9, 0, 4, 3, 4, 5])
    np.testing.assert_array_equal(array[rows], whole[rows])
    assert array[np.array([], np.int64)].shape == (0, 2, 3)
    with pytest.raises(IndexError, match="rows 0 to 10 of 10"):
        array[np.array([0, 10])]


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_inside_an_npz_file_is_mapped_where_it_lies(tmp_path: Path, order: Any) -> None:
    x = np.asarray(np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 6), order=order)
    np.savez(tmp_path / "data.npz", allow_pickle=False, y=np.arange(ROWS), x=x)
    array = open_array(tmp_path / "data.npz", member="x")
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(array, x)


def test_examples_are_had_by_their_numbers_or_in_their_order() -> None:
    x = {"a": np.arange(ROWS, dtype=np.float32), "b": np.arange(ROWS * 2).reshape(ROWS, 2)}
    data = array_examples((x, np.arange(ROWS) * 10))
    assert data.size == ROWS
    assert data.element_spec == (
        {"a": tf.TensorSpec((), tf.float32), "b": tf.TensorSpec((2,), tf.int64)},
        tf.TensorSpec((), tf.int64),
    )
    fetched, y = data.fetch(tf.constant([7, 2], tf.int64))
    assert fetched["b"].numpy().tolist() == [[14, 15], [4, 5]]
    assert y.numpy().tolist() == [70, 20]
    dataset = data.dataset(rows_at_once=4)
    assert dataset.element_spec == data.element_spec
    assert int(dataset.cardinality()) == ROWS
    assert [int(y) for _, y in dataset.as_numpy_iterator()] == list(range(0, 100, 10))


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ExperimentError, match="the arrays have 3, 4 rows; expected as many in each"):
        array_examples((np.zeros(3), np.zeros(4)))


def npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", allow_pickle=False, x=np.zeros(3))
    return folder / "a.npz"


def compressed(folder: Path) -> Path:
    np.savez_compressed(folder / "c.npz", allow_pickle=False, x=np.zeros(3))
    return folder / "c.npz"


def torn(folder: Path) -> Path:
    path = write(folder, "torn.npy", np.zeros(1000))
    path.write_bytes(path.read_bytes()[:500])
    return path


@pytest.mark.parametrize(
    ("open_it", "message"),
    [
        (lambda _: open_array(), "given no file"),
        (lambda folder: open_array(folder / "none.npy"), r"none\.npy cannot be opened as an array: .*No such file"),
        (lambda folder: open_array(torn(folder)), r"torn\.npy cannot be opened as an array"),
        (lambda folder: open_array(npz(folder)), "say which of its arrays with member="),
        (lambda folder: open_array(npz(folder), member="y"), "There is no item named 'y.npy'"),
        (lambda folder: open_array(compressed(folder), member="x"), "x is compressed; write it with np.savez"),
        (lambda folder: open_array(write(folder, "one.npy", np.float32(1))), "a single value; expected rows"),
        (
            lambda folder: open_array(write(folder, "a.npy", np.zeros((2, 3))), write(folder, "b.npy", np.zeros(2))),
            r"rows of <f8\[\], <f8\[3\]; expected the same in each file",
        ),
    ],
)
def test_what_is_no_such_array_is_refused(tmp_path: Path, open_it: Callable[[Path], Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        open_it(tmp_path)
