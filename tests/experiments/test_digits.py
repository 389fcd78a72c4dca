"""The bundled experiment on real data."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from understudy.experiments import Experiment, load_experiment

if TYPE_CHECKING:
    from understudy.experiments.digits_data import Split

_SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@pytest.fixture(scope="module")
def digits(logical_cpus: tuple[str, ...]) -> Experiment:
    del logical_cpus  # TensorFlow's devices are laid out before anything uses it.
    return load_experiment("digits")


def test_the_parts_share_no_image_and_together_hold_all(digits: Experiment) -> None:
    from sklearn.datasets import load_digits

    from understudy.experiments.digits_data import load_split

    del digits
    pixels, labels = load_digits(return_X_y=True)
    parts = [load_split(split) for split in _SPLITS]
    indices = np.concatenate([part.indices for part in parts])
    assert [len(part.y) for part in parts] == [1200, 297, 300]
    assert sorted(indices) == list(range(1797))
    assert np.array_equal(np.concatenate([part.y for part in parts]), labels[indices])
    assert np.array_equal(np.concatenate([part.x for part in parts]).reshape(-1, 64) * 16, pixels[indices])


def test_every_part_has_every_digit(digits: Experiment) -> None:
    from understudy.experiments.digits_data import load_split

    del digits
    for split in _SPLITS:
        assert set(load_split(split).y) == set(range(10))


def test_the_split_is_the_same_everywhere_and_for_ever(digits: Experiment) -> None:
    from understudy.experiments.digits_data import load_split

    del digits
    order = ",".join(str(index) for split in _SPLITS for index in load_split(split).indices)
    assert (
        hashlib.sha256(order.encode()).hexdigest() == "3bbb2f3dca2a3f0ab1bb49a7f30114547d7e917cdc2457127e371ac26e8897f2"
    )


def test_examples_are_single_typed_and_counted(digits: Experiment) -> None:
    datasets = {"train": digits.training_data(), **digits.evaluation_data()}
    assert list(datasets) == ["train", "validation", "test"]
    for dataset, size in zip(datasets.values(), (1200, 297, 300), strict=True):
        assert dataset.cardinality() == size
        x, y = dataset.element_spec
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((8, 8, 1), "float32", (), "int64")
        pixels, _ = next(dataset.batch(size).as_numpy_iterator())
        assert (pixels.min(), pixels.max()) == (0.0, 1.0)


def training_data(digits: Experiment) -> Any:
    return digits.training_data()


def test_the_order_is_the_same_on_every_call(digits: Experiment) -> None:
    one, other = (list(dataset.as_numpy_iterator()) for dataset in (training_data(digits), training_data(digits)))
    assert all(np.array_equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(one, other, strict=True))


def test_the_model_is_built_and_compiled_and_its_tensors_named(digits: Experiment) -> None:
    model = digits.build_model()
    assert model.compiled
    assert model.built
    assert model.name == "digits"
    assert [(tensor.name, tensor.shape) for tensor in model.inputs] == [("image", (None, 8, 8, 1))]
    assert model.output_names == ["digit"]
    assert model.output_shape == (None, 10)
    layers = {type(layer).__name__ for layer in model.layers}
    assert {"Conv2D", "BatchNormalization", "Dropout"} <= layers


def test_it_learns_to_read_digits_within_seconds(digits: Experiment) -> None:
    import keras

    keras.utils.set_random_seed(1)
    model = digits.build_model()
    batches = training_data(digits).shuffle(1200, seed=1).repeat().batch(digits.global_batch_size)
    model.fit(batches, steps_per_epoch=200, shuffle=False, verbose=0)
    scores = model.evaluate(digits.evaluation_data()["test"].batch(300), return_dict=True, verbose=0)
    assert scores["accuracy"] >= 0.97
