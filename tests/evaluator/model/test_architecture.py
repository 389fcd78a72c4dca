"""Two files are of one architecture if they compute and score alike, whatever process wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from testkit import more_sample_models
from understudy.checkpoints import ModelKind
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.loaders.stored_config import read_archive

pytestmark = pytest.mark.usefixtures("logical_cpus")

FORMATS = {"keras": ModelKind.KERAS, "h5": ModelKind.HDF5}
Build = Callable[..., Any]


def save(folder: Path, name: str, model: Any, suffix: str = "keras") -> Path:
    file = folder / f"{name}.{suffix}"
    if model.compiled and model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)  # or Keras complains when it loads the file
    model.save(file)
    return file


def architecture_of(file: Path) -> str:
    return loader_for(FORMATS[file.suffix[1:]], None).architecture_of(file)


def build_something_else() -> None:
    """Move every counter that Keras names objects by."""
    keras.metrics.AUC()
    inputs = keras.Input((3,))
    keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.BatchNormalization()])
    keras.Model(inputs, layers.Add()([keras.ops.relu(inputs + 1.0), layers.Dropout(0.1)(inputs)]))


def net(
    *,
    width: int = 4,
    name: str | None = None,
    input_name: str | None = None,
    output_name: str | None = None,
    activation: str | None = None,
    metric: Any = "accuracy",
    loss: Any = "mean_squared_error",
    loss_weights: Any = None,
    dtype: str = "float32",
    swap: bool = False,
    shared: bool = False,
    seed: int | None = None,
    optimizer: str = "adam",
    regularizer: str | None = None,
) -> Any:
    x = keras.Input((6,), name=input_name, dtype=dtype)
    initializer = keras.initializers.GlorotUniform(seed=seed)
    hidden = layers.Dense(width, name=name, kernel_initializer=initializer, kernel_regularizer=regularizer)(x)
    first = layers.Dense(width, activation=activation)
    second = first if shared else layers.Dense(width, activation=activation)
    merged = layers.Add()([first(hidden), layers.ReLU()(second(layers.Dropout(0.5, seed=seed)(hidden)))])
    one, other = layers.Dense(2, name=output_name)(merged), layers.Dense(2)(hidden)
    model = keras.Model(x, [other, one] if swap else [one, other])
    losses, metrics = [loss, keras.losses.MeanSquaredError()], [[metric], [keras.metrics.MeanAbsoluteError()]]
    model.compile(optimizer, loss=losses, metrics=metrics, loss_weights=loss_weights)
    return model


def wrapped(*, shared: bool) -> Any:
    """One dense layer on its own and in a wrapper, or two equal ones, which Keras tells apart by an id alone."""
    x = keras.Input((5, 3))
    dense = layers.Dense(3)
    other = dense if shared else layers.Dense(3)
    return keras.Model(x, layers.Add()([layers.TimeDistributed(dense)(x), other(x)]))


def with_operations() -> Any:
    """Its operation has the name of an activation."""
    x = keras.Input((3,))
    return keras.Model(x, keras.ops.relu(layers.Dense(3, activation="relu")(x) + 1.0))


def deferred(*, rows: int) -> Any:
    """Its first batch tells its shapes."""
    model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    model(np.zeros((rows, 4), np.float32))
    return model


KINDS = (
    *("image classifier", "two inputs, two outputs", "subclassed", "recurrent", "functions of its own", "words"),
    *("attention, weighted tokens", "a model in a model", "subclassed, nested outputs"),
)

MODELS: dict[str, Build] = {
    **{name: more_sample_models.KINDS[name].build for name in KINDS},
    "two branches": net,
    "a layer that is called twice": lambda: net(shared=True),
    "built by its first batch": lambda: deferred(rows=3),
    "an operation named like an activation": with_operations,
    "unnamed metrics": lambda: net(metric=keras.metrics.AUC()),
}

SAME: dict[str, Build] = {
    "the name of an inner layer": lambda: net(name="trunk"),
    "seeds of initializers and dropout": lambda: net(seed=7),
    "the optimizer": lambda: net(optimizer="sgd"),
}

OTHER: dict[str, Build] = {
    "the width": lambda: net(width=5),
    "an activation": lambda: net(activation="relu"),
    "a metric": lambda: net(metric="mae"),
    "a metric's name": lambda: net(metric=keras.metrics.MeanSquaredError(name="squares")),
    "a loss": lambda: net(loss="mae"),
    "the weights of losses": lambda: net(loss_weights=[1.0, 0.5]),
    "an input's name": lambda: net(input_name="features"),
    "an output's name": lambda: net(output_name="score"),
    "an input's dtype": lambda: net(dtype="float16"),
    "which layer feeds which output": lambda: net(swap=True),
    "a layer that is called twice": lambda: net(shared=True),
    "a regularizer": lambda: net(regularizer="l2"),
}


def is_writable(name: str, suffix: str) -> bool:
    """Return whether Keras writes such models in a format and reads them again: classes of its own only in one."""
    return suffix == "keras" or name in {"two branches", "a layer that is called twice", "built by its first batch"}


CASES = [(name, suffix) for suffix in FORMATS for name in MODELS if is_writable(name, suffix)]


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_a_model_that_was_built_or_loaded_again_is_the_same_and_takes_the_weights(
    name: str, suffix: str, tmp_path: Path
) -> None:
    first = save(tmp_path, "first", MODELS[name](), suffix)
    build_something_else()
    second = save(tmp_path, "second", MODELS[name](), suffix)
    again = save(tmp_path, "again", keras.saving.load_model(first), suffix)

    assert architecture_of(first) == architecture_of(second) == architecture_of(again)
    loader = loader_for(FORMATS[suffix], None)
    ours, theirs = (loader.build(file).model for file in (again, second))
    loader.assign(ours, second)
    for one, other in zip(ours.variables, theirs.variables, strict=True):
        if "seed_generator" not in one.path:  # which no file holds
            np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("change", SAME)
@pytest.mark.parametrize("suffix", FORMATS)
def test_what_neither_outputs_nor_scores_depend_on_is_no_part_of_it(change: str, suffix: str, tmp_path: Path) -> None:
    base, changed = save(tmp_path, "base", net(), suffix), save(tmp_path, "changed", SAME[change](), suffix)

    assert architecture_of(base) == architecture_of(changed)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_change_of_what_is_computed_is_another_architecture(suffix: str, tmp_path: Path) -> None:
    found = {architecture_of(save(tmp_path, "base", net(), suffix))}
    for number, (change, build) in enumerate(OTHER.items()):
        found.add(architecture_of(save(tmp_path, str(number), build(), suffix)))
        assert len(found) == number + 2, change


def test_the_batch_that_a_model_was_built_with_is_no_part_of_it(tmp_path: Path) -> None:
    one, other = save(tmp_path, "one", deferred(rows=3)), save(tmp_path, "other", deferred(rows=8))

    assert architecture_of(one) == architecture_of(other)


def test_a_layer_that_is_shared_is_told_from_one_that_is_equal(tmp_path: Path) -> None:
    one, two = save(tmp_path, "one", wrapped(shared=True)), save(tmp_path, "two", wrapped(shared=False))
    build_something_else()
    again = save(tmp_path, "again", wrapped(shared=True))

    assert architecture_of(one) == architecture_of(again) != architecture_of(two)


def test_a_vocabulary_is_a_part_of_it(tmp_path: Path) -> None:
    def model(words: list[str]) -> Any:
        x = keras.Input((1,), dtype="string", name="words")
        return keras.Model(x, layers.StringLookup(vocabulary=words)(x))

    found = {architecture_of(save(tmp_path, "-".join(words), model(words))) for words in (["a", "b"], ["b", "a"])}

    assert len(found) == 2


def test_scores_have_the_names_of_a_process_that_built_nothing_else(tmp_path: Path) -> None:
    build_something_else()
    model = net()
    model.compile("sgd", ["mse", "mse"], metrics=[[keras.metrics.AUC()], [keras.metrics.AUC(), keras.metrics.AUC()]])

    first, second = read_archive(save(tmp_path, "model", model)).compilation["metrics"]

    assert [metric["config"]["name"] for metric in (*first, *second)] == ["auc", "auc_1", "auc_2"]


def test_a_default_name_that_keras_does_not_number_stays(tmp_path: Path) -> None:
    build_something_else()
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, activation="softmax")])
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalCrossentropy(), keras.metrics.AUC(), keras.metrics.AUC()],
    )

    config = read_archive(save(tmp_path, "model", model)).compilation

    names = [metric["config"]["name"] for metric in config["metrics"]]
    assert names == ["sparse_categorical_crossentropy", "auc", "auc_1"]
