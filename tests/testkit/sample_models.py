"""Models of every kind, compiled, with matching data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

PACKAGE = "understudy_tests_sample_models"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model and its data: ``data`` draws inputs, targets and weights for a number of examples."""

    build: Callable[[], Any]
    data: Callable[[np.random.Generator, int], tuple[Any, Any, Any]]
    whole: str | None = None
    """The reason in the slot's note if the model must see whole batches."""


@keras.saving.register_keras_serializable(PACKAGE)
class Spread(keras.metrics.Metric):  # type: ignore[misc]
    """Depends on the whole batch: the mean over batches of the range of all predictions in the batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        self.total.assign_add(ops.max(y_pred) - ops.min(y_pred))
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.count


@keras.saving.register_keras_serializable(PACKAGE)
class Longest(keras.metrics.Metric):  # type: ignore[misc]
    """Has a non-zero initial state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.least = self.add_weight(name="least", initializer="ones")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        self.least.assign(ops.minimum(self.least, ops.min(y_pred)))

    def reset_state(self) -> None:
        self.least.assign(1e9)

    def result(self) -> Any:
        return self.least


@keras.saving.register_keras_serializable(PACKAGE)
class ErrorByName(keras.metrics.Metric):  # type: ignore[misc]
    """Has several values by name, as `keras.Model.evaluate` accepts: of one component, and of all."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total = self.add_weight(name="total", shape=(3,), initializer="zeros")
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del sample_weight
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred), axis=0))
        self.seen.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

    def result(self) -> dict[str, Any]:
        means = self.total / self.seen
        return {"first": means[0], "components": {"each": means}}


@keras.saving.register_keras_serializable(PACKAGE)
class PlainVariable(keras.metrics.Metric):  # type: ignore[misc]
    """Keeps its state in a plain variable, which Keras does not track."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total = tf.Variable(0.0)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        self.total.assign_add(tf.reduce_sum(y_pred))

    def reset_state(self) -> None:
        self.total.assign(0.0)

    def result(self) -> Any:
        return self.total


@keras.saving.register_keras_serializable(PACKAGE)
class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = layers.Dense(8, activation="relu", kernel_regularizer="l1l2")
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(3, activation="softmax")

    def call(self, inputs: Any, training: bool = False) -> Any:  # noqa: FBT001, FBT002
        return self.head(self.norm(self.hidden(inputs), training=training))


@keras.saving.register_keras_serializable(PACKAGE)
class TwoHeads(keras.Model):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = layers.Dense(2)
        self.second = layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return {"heads": [self.first(inputs), self.second(inputs)]}


@keras.saving.register_keras_serializable(PACKAGE)
class Text(keras.Model):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(11, 4, mask_zero=True)
        self.pooling = layers.GlobalAveragePooling1D()
        self.head = layers.Dense(1, activation="sigmoid")

    def call(self, inputs: Any, training: bool = False) -> Any:  # noqa: FBT001, FBT002
        del training
        return self.head(self.pooling(self.embedding(inputs)))


@keras.saving.register_keras_serializable(PACKAGE)
class OwnTestStep(keras.Model):  # type: ignore[misc]
    """Has its own test_step and returns its own logs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = keras.metrics.Sum(name="seen")

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predictions = self(x, training=False)
        self.seen.update_state(ops.abs(y - predictions))
        return {"seen": self.seen.result(), "last": ops.mean(predictions)}


@keras.saving.register_keras_serializable(PACKAGE)
class OwnLoss(keras.Model):  # type: ignore[misc]
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,  # noqa: FBT001, FBT002
    ) -> Any:
        base = super().compute_loss(x, y, y_pred, sample_weight, training)
        return base + ops.var(self(x, training=False))


@keras.saving.register_keras_serializable(PACKAGE)
class AddsLoss(layers.Layer):  # type: ignore[misc]
    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.std(inputs))
        return inputs


@keras.saving.register_keras_serializable(PACKAGE)
class BatchStatistics(layers.Layer):  # type: ignore[misc]
    """Uses the statistics of the current batch at inference too."""

    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


@keras.saving.register_keras_serializable(PACKAGE)
class Noise(layers.Layer):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds)


def image_classifier() -> Any:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(5, activation="softmax"),
        ]
    )
    model.compile(
        "adam",
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
        weighted_metrics=["accuracy"],
    )
    _shake(model)
    return model


def image_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return rng.normal(size=(rows, 6, 6, 1)).astype(np.float32), rng.integers(0, 5, rows), _weights(rng, rows)


def two_by_two() -> Any:
    left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
    joined = layers.Concatenate()([left, right])
    outputs = {
        "odds": layers.Dense(1, activation="sigmoid", name="odds")(joined),
        "value": layers.Dense(2, name="value")(joined),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        "sgd",
        {"odds": "binary_crossentropy", "value": "mse"},
        loss_weights={"odds": 1.0, "value": 0.3},
        metrics={"odds": [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.Recall()], "value": ["mae"]},
        weighted_metrics={"odds": ["accuracy"]},
    )
    return model


def two_by_two_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    inputs = {"left": rng.normal(size=(rows, 3)).astype("f4"), "right": rng.normal(size=(rows, 2)).astype("f4")}
    targets = {"odds": rng.integers(0, 2, (rows, 1)).astype("f4"), "value": rng.normal(size=(rows, 2)).astype("f4")}
    return inputs, targets, {"odds": _weights(rng, rows), "value": _weights(rng, rows)}


def subclassed() -> Any:
    model = Subclassed()
    model(np.zeros((2, 4), np.float32))
    model.compile(
        "adam",
        "categorical_crossentropy",
        metrics=["accuracy", keras.metrics.F1Score(average=None), keras.metrics.OneHotMeanIoU(3, name="iou")],
    )
    _shake(model)
    return model


def one_hot_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return rng.normal(size=(rows, 4)).astype("f4"), np.eye(3, dtype="f4")[rng.integers(0, 3, rows)], _weights(rng, rows)


def regression() -> Any:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    model.compile(
        "sgd",
        keras.losses.Huber(),
        metrics=[keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError(), Spread(name="spread"), Longest()],
        weighted_metrics=["mae"],
    )
    return model


def plain_variable() -> Any:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", "mse", metrics=[PlainVariable(name="plain")])
    return model


def regression_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return rng.normal(size=(rows, 4)).astype("f4"), rng.normal(size=(rows, 2)).astype("f4"), _weights(rng, rows)


def tagger() -> Any:
    """Masks its padding, and the mask reaches the loss."""
    inputs = keras.Input((None,), dtype="int32", name="tokens")
    embedded = layers.Embedding(11, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(embedded))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def recurrent() -> Any:
    inputs = keras.Input((None,), dtype="int32", name="tokens")
    embedded = layers.TimeDistributed(layers.Dense(4))(layers.Embedding(11, 4, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.GRU(3)(embedded)))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def tagger_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    length = int(rng.integers(3, 9))
    return rng.integers(0, 11, (rows, length)).astype("i4"), rng.integers(0, 3, (rows, length)), None


def text() -> Any:
    model = Text()
    model(np.ones((2, 5), np.int32))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", "AUC"])
    return model


def text_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    tokens = rng.integers(1, 11, (rows, int(rng.integers(1, 9)))).astype("i4")
    return tokens, rng.integers(0, 2, (rows, 1)).astype("f4"), _weights(rng, rows)


def adds_loss() -> Any:
    inputs = keras.Input((4,), name="x")
    hidden = layers.Dropout(0.3)(layers.BatchNormalization()(AddsLoss()(inputs)))
    model = keras.Model(inputs, layers.Dense(2, kernel_regularizer="l2")(hidden))
    model.compile("sgd", "mse", metrics=["mae"])
    _shake(model)
    return model


def activity_regularized() -> Any:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2, activity_regularizer="l2")(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def own_test_step() -> Any:
    inputs = keras.Input((4,), name="x")
    model = OwnTestStep(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", "mse")
    return model


def unweighted_regression_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return (*regression_data(rng, rows)[:2], None)


def own_loss() -> Any:
    inputs = keras.Input((4,), name="x")
    model = OwnLoss(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def batch_statistics() -> Any:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, BatchStatistics()(layers.Dense(2)(inputs)))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def binary_metrics() -> Any:
    model = _passing_through(1)
    metrics = keras.metrics
    model.compile(
        "sgd",
        "binary_crossentropy",
        metrics=[
            "accuracy",
            metrics.AUC(name="roc"),
            metrics.AUC(curve="PR", name="pr"),
            metrics.Precision(),
            metrics.Recall(),
            metrics.F1Score(threshold=0.5),
            metrics.BinaryIoU(),
            metrics.SensitivityAtSpecificity(0.5),
            metrics.FalseNegatives(),
        ],
        weighted_metrics=[metrics.AUC(name="weighted_roc"), metrics.TruePositives()],
    )
    return model


def binary_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return rng.uniform(size=(rows, 1)).astype("f4"), rng.integers(0, 2, (rows, 1)).astype("f4"), _weights(rng, rows)


def class_metrics() -> Any:
    model = _passing_through(4)
    metrics = keras.metrics
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            "accuracy",
            metrics.SparseTopKCategoricalAccuracy(2, name="top2"),
            metrics.MeanIoU(4, sparse_y_pred=False),
        ],
        weighted_metrics=["accuracy", metrics.SparseCategoricalCrossentropy(from_logits=True)],
    )
    return model


def class_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return rng.normal(size=(rows, 4)).astype("f4"), rng.integers(0, 4, rows), _weights(rng, rows)


def value_metrics() -> Any:
    model = _passing_through(3)
    metrics = keras.metrics
    model.compile(
        "sgd",
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        metrics=[
            *(metrics.R2Score(), metrics.RootMeanSquaredError(), metrics.CosineSimilarity()),
            *(Spread(name="spread"), ErrorByName()),
        ],
        weighted_metrics=[metrics.R2Score(name="weighted_r2"), metrics.PearsonCorrelation(), "mae"],
    )
    return model


def value_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return rng.normal(size=(rows, 3)).astype("f4"), rng.normal(size=(rows, 3)).astype("f4"), _weights(rng, rows)


def _passing_through(width: int) -> Any:
    inputs = keras.Input((width,))
    return keras.Model(inputs, layers.Identity()(inputs))


PASSED_THROUGH: dict[str, Kind] = {
    "binary metrics": Kind(build=binary_metrics, data=binary_data),
    "class metrics": Kind(build=class_metrics, data=class_data),
    "value metrics": Kind(build=value_metrics, data=value_data),
}

KINDS: dict[str, Kind] = {
    **PASSED_THROUGH,
    "image classifier": Kind(build=image_classifier, data=image_data),
    "two inputs, two outputs": Kind(build=two_by_two, data=two_by_two_data),
    "subclassed": Kind(build=subclassed, data=one_hot_data),
    "regression": Kind(build=regression, data=regression_data),
    "metric with a plain variable": Kind(build=plain_variable, data=regression_data),
    "masked sequences": Kind(build=tagger, data=tagger_data),
    "recurrent": Kind(build=recurrent, data=text_data),
    "text of any length": Kind(build=text, data=text_data),
    "adds a loss": Kind(build=adds_loss, data=regression_data, whole="adds losses"),
    "activity regularizer": Kind(build=activity_regularized, data=regression_data, whole="adds losses"),
    "test_step of its own": Kind(build=own_test_step, data=unweighted_regression_data, whole="test_step"),
    "compute_loss of its own": Kind(build=own_loss, data=regression_data, whole="compute_loss"),
    "coupled examples": Kind(build=batch_statistics, data=regression_data, whole="influence each other"),
}


def cut(structure: Any, start: int, stop: int) -> Any:
    """Return examples of every array in a structure."""
    return keras.tree.map_structure(lambda array: None if array is None else array[start:stop], structure)


def evaluate_on_one_device(model: Any, batches: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """Return the result of `model.evaluate` for these batches, from a dataset of known length."""
    parts = [keras.tree.lists_to_tuples(batch) for batch in batches]  # as tf.data wants them
    none = keras.tree.map_structure(_without_rows, parts[0])  # its shape leaves the batch size open when it is skipped
    datasets = map(tf.data.Dataset.from_tensors, [none, *parts])
    dataset = functools.reduce(lambda before, after: before.concatenate(after), datasets).skip(1)
    return flat_logs(model.evaluate(dataset, verbose=0, return_dict=True))


def step_on_one_device(model: Any, batches: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """Return what `evaluate_on_one_device` does, in a third of the time: the same steps, without datasets.

    A step that `evaluate_on_one_device` has not run with batches of the same structure is traced for one batch size.
    """
    model.make_test_function()
    model.reset_metrics()
    logs: dict[str, Any] = {}
    for batch in batches:
        arrays = keras.tree.lists_to_tuples(batch)
        tensors = keras.tree.map_structure(lambda each: None if each is None else tf.convert_to_tensor(each), arrays)
        logs = model.test_function(iter([tensors]))
    return flat_logs(model._get_metrics_result_or_logs(logs))


def flat_logs(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers; vectors become ``name/0``, ``name/1``, ..., and values by name have these names."""
    flat: dict[str, float] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            flat.update(flat_logs(value))
            continue
        array = np.asarray(value)
        flat.update({f"{name}/{i}": float(v) for i, v in enumerate(array)} if array.ndim else {name: float(array)})
    return flat


def _without_rows(array: Any) -> Any:
    spec = open_spec(array)
    return tf.zeros([length or 0 for length in spec.shape], spec.dtype)


def open_spec(array: Any) -> Any:
    """Return the specification of an array with an open batch size and, for tokens, an open length."""
    dims = [None, None] if array.ndim == 2 and array.dtype.kind == "i" else [None, *array.shape[1:]]
    return tf.TensorSpec(dims, tf.string if array.dtype.kind == "O" else array.dtype)


def _weights(rng: np.random.Generator, rows: int) -> Any:
    return rng.uniform(0.0, 2.0, rows).astype(np.float32)


def _shake(model: Any) -> None:
    """Give the statistics of normalization layers non-default values."""
    rng = np.random.default_rng(1)
    for variable in model.non_trainable_variables:
        if "moving" in variable.path:
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
