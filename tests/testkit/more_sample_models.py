"""More models: nested structures, custom functions, and other cases of the guarantee."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from testkit import sample_models
from testkit.sample_models import PACKAGE, Kind
from understudy.evaluator.types import MetricSpec

WORDS = np.array([b"red", b"green", b"blue", b"unheard of"], dtype=object)


@keras.saving.register_keras_serializable(PACKAGE)  # type: ignore[untyped-decorator]
def own_loss_function(y_true: Any, y_pred: Any) -> Any:
    """Return the mean of a power for each example, which no loss of Keras's does."""
    return ops.mean(ops.power(ops.abs(y_true - y_pred), 1.5), axis=-1)


@keras.saving.register_keras_serializable(PACKAGE)  # type: ignore[untyped-decorator]
def own_metric_function(y_true: Any, y_pred: Any) -> Any:
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


@keras.saving.register_keras_serializable(PACKAGE)
class OwnMetrics(keras.Model):  # type: ignore[misc]
    """Computes a metric beside the compiled ones."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        results: dict[str, Any] = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "last_rows": ops.cast(ops.shape(y_pred)[0], "float32")}


@keras.saving.register_keras_serializable(PACKAGE)
class DelegatingTestStep(keras.Model):  # type: ignore[misc]
    """Has a ``test_step`` that prepares the data and delegates to Keras."""

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        logs: dict[str, Any] = super().test_step((x, ops.clip(y, -1.0, 1.0)))
        return logs


def nested() -> Any:
    """Take ``{"pair": [a, b], "extra": c}`` and give ``{"heads": [h, i], "deep": {"value": v}}``."""
    a, b, c = keras.Input((2,)), keras.Input((3,)), keras.Input((1,), name="extra")
    joined = layers.LayerNormalization()(layers.Concatenate()([a, b, c]))
    heads = [layers.Dense(2, name="first")(joined), layers.Dense(1, activation="sigmoid", name="second")(joined)]
    outputs = {"deep": {"value": layers.Dense(2, name="value")(joined)}, "heads": heads}
    model = keras.Model({"extra": c, "pair": [a, b]}, outputs)
    model.compile("sgd", loss="mse")
    return model


def nested_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    inputs = {"extra": _normal(rng, rows, 1), "pair": [_normal(rng, rows, 2), _normal(rng, rows, 3)]}
    targets = {"deep": {"value": _normal(rng, rows, 2)}, "heads": [_normal(rng, rows, 2), _normal(rng, rows, 1)]}
    return inputs, targets, None


def two_in_a_list() -> Any:
    inputs = keras.Input((4,), name="x")
    hidden = layers.Dropout(0.4)(layers.Dense(6, activation="tanh")(inputs))
    outputs = [layers.Dense(1, name="first")(hidden), layers.Dense(2, activation="softmax", name="second")(hidden)]
    model = keras.Model(inputs, outputs)
    model.compile(
        "sgd",
        loss=["mae", "categorical_crossentropy"],
        loss_weights=[0.5, 2.0],
        metrics=[["mse"], ["accuracy", keras.metrics.F1Score(average="macro")]],
        weighted_metrics=[[], [keras.metrics.Precision(), keras.metrics.AUC(multi_label=True, num_labels=2)]],
    )
    return model


def two_in_a_list_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    targets = [_normal(rng, rows, 1), np.eye(2, dtype="f4")[rng.integers(0, 2, rows)]]
    return _normal(rng, rows, 4), targets, [_weights(rng, rows), _weights(rng, rows)]


def two_heads() -> Any:
    model = sample_models.TwoHeads()
    model(np.zeros((2, 4), np.float32))
    model.compile("sgd", loss="mse")
    return model


def two_heads_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return _normal(rng, rows, 4), {"heads": [_normal(rng, rows, 2), _normal(rng, rows, 2)]}, None


def attention() -> Any:
    """Weighs each token: weights and targets are ``[examples, tokens]``."""
    inputs = keras.Input((6, 4), name="tokens")
    attended = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    hidden = layers.LayerNormalization()(layers.Add()([inputs, attended]))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def attention_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    weights = rng.uniform(0, 2, (rows, 6)).astype("f4")
    return rng.normal(size=(rows, 6, 4)).astype("f4"), rng.integers(0, 3, (rows, 6)), weights


def own_functions() -> Any:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2)(layers.GaussianNoise(0.5)(inputs)))
    model.compile("sgd", own_loss_function, metrics=[own_metric_function], weighted_metrics=[own_metric_function])
    return model


def own_metrics() -> Any:
    inputs = keras.Input((4,), name="x")
    model = OwnMetrics(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"), metrics=["mae"])
    return model


def delegating_test_step() -> Any:
    inputs = keras.Input((4,), name="x")
    model = DelegatingTestStep(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def within_one_another() -> Any:
    """Nests a model in a model, both with normalization."""
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(4, kernel_regularizer="l1"), layers.BatchNormalization()])
    statistics = layers.Normalization()
    statistics.adapt(np.random.default_rng(0).normal(1.0, 3.0, (50, 5)))
    model = keras.Sequential([keras.Input((5,)), statistics, inner, layers.BatchNormalization(), layers.Dense(2)])
    model.compile("sgd", "log_cosh", metrics=["mae"], weighted_metrics=[keras.metrics.R2Score()])
    sample_models._shake(model)
    return model


def within_one_another_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return _normal(rng, rows, 5), _normal(rng, rows, 2), _weights(rng, rows)


def words() -> Any:
    inputs = keras.Input((2,), dtype="string", name="words")
    indices = layers.StringLookup(vocabulary=["red", "green", "blue"])(inputs)
    hidden = layers.Flatten()(layers.Embedding(4, 3)(indices))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile("sgd", keras.losses.BinaryFocalCrossentropy(), metrics=["accuracy"], weighted_metrics=["AUC"])
    return model


def words_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    targets = rng.integers(0, 2, (rows, 1)).astype("f4")
    return WORDS[rng.integers(0, len(WORDS), (rows, 2))], targets, _weights(rng, rows)


def many_labels() -> Any:
    model = sample_models._passing_through(3)
    metrics = keras.metrics
    model.compile(
        "sgd",
        "binary_crossentropy",
        metrics=[
            metrics.AUC(multi_label=True, num_labels=3),
            metrics.FBetaScore(beta=2.0, threshold=0.4),
            metrics.Precision(top_k=2, name="precision_of_two"),
            metrics.Recall(class_id=1, name="recall_of_one"),
            metrics.BinaryIoU([0, 1], threshold=0.3),
            metrics.PrecisionAtRecall(0.6),
            sample_models.Spread(name="spread"),
        ],
        weighted_metrics=[metrics.F1Score(average="weighted", threshold=0.5), "mse"],
    )
    return model


def many_labels_data(rng: np.random.Generator, rows: int) -> tuple[Any, Any, Any]:
    return rng.uniform(size=(rows, 3)).astype("f4"), rng.integers(0, 2, (rows, 3)).astype("f4"), _weights(rng, rows)


def _normal(rng: np.random.Generator, rows: int, width: int) -> Any:
    return rng.normal(size=(rows, width)).astype(np.float32)


def _weights(rng: np.random.Generator, rows: int) -> Any:
    return rng.uniform(0.0, 2.0, rows).astype(np.float32)


PASSED_THROUGH: dict[str, Kind] = {
    **sample_models.PASSED_THROUGH,
    "many labels": Kind(build=many_labels, data=many_labels_data),
}

KINDS: dict[str, Kind] = {
    **sample_models.KINDS,
    **PASSED_THROUGH,
    "nested inputs and outputs": Kind(build=nested, data=nested_data),
    "outputs in a list": Kind(build=two_in_a_list, data=two_in_a_list_data),
    "subclassed, nested outputs": Kind(build=two_heads, data=two_heads_data),
    "attention, weighted tokens": Kind(build=attention, data=attention_data),
    "functions of its own": Kind(build=own_functions, data=sample_models.regression_data),
    "compute_metrics of its own": Kind(build=own_metrics, data=sample_models.regression_data),
    "test_step that delegates": Kind(
        build=delegating_test_step, data=sample_models.unweighted_regression_data, whole="test_step"
    ),
    "a model in a model": Kind(build=within_one_another, data=within_one_another_data),
    "words": Kind(build=words, data=words_data),
}


def _specs(*names: str, **configured: dict[str, Any]) -> tuple[MetricSpec, ...]:
    return (
        *(MetricSpec(name=name) for name in names),
        *(MetricSpec(name=n, config=c) for n, c in configured.items()),
    )


_OF_PROBABILITIES = _specs(
    "accuracy",
    "binary_crossentropy",
    "BinaryIoU",
    "FalseNegatives",
    "Hinge",
    "Precision",
    "TruePositives",
    f"{PACKAGE}>Spread",
    AUC={"num_thresholds": 50},
    BinaryAccuracy={"threshold": 0.3},
    F1Score={"threshold": 0.5},
    FBetaScore={"beta": 0.5, "threshold": 0.4, "average": "micro"},
    PrecisionAtRecall={"recall": 0.4},
    Recall={"thresholds": [0.2, 0.7]},
    SensitivityAtSpecificity={"specificity": 0.7},
)
_OF_CLASSES = _specs(
    "accuracy",
    "SparseCategoricalAccuracy",
    f"{PACKAGE}>Longest",
    MeanIoU={"num_classes": 5, "sparse_y_pred": False},
    SparseCategoricalCrossentropy={"from_logits": True},
    SparseTopKCategoricalAccuracy={"k": 3},
)
_OF_ONE_HOT = _specs(
    "accuracy",
    "CategoricalHinge",
    "KLDivergence",
    AUC={"multi_label": True, "num_labels": 3, "curve": "PR"},
    CategoricalCrossentropy={"label_smoothing": 0.1},
    F1Score={"average": "macro"},
    OneHotIoU={"num_classes": 3, "target_class_ids": [0, 2]},
    Precision={"top_k": 1},
    TopKCategoricalAccuracy={"k": 2},
)
_OF_VALUES = _specs(
    "mae",
    "LogCoshError",
    "MeanAbsolutePercentageError",
    "RootMeanSquaredError",
    f"{PACKAGE}>Spread",
    ConcordanceCorrelation={"axis": -1},
    CosineSimilarity={"axis": -1},
    PearsonCorrelation={"axis": -1},
    R2Score={"class_aggregation": "variance_weighted_average"},
)

NAMED: dict[str, tuple[MetricSpec, ...]] = {
    "binary metrics": _OF_PROBABILITIES,
    "recurrent": _OF_PROBABILITIES,
    "text of any length": _OF_PROBABILITIES,
    "words": _OF_PROBABILITIES,
    "class metrics": _OF_CLASSES,
    "image classifier": _OF_CLASSES,
    "subclassed": _OF_ONE_HOT,
    "value metrics": _OF_VALUES,
    "regression": _OF_VALUES,
    "adds a loss": _OF_VALUES,
    "coupled examples": _OF_VALUES,
    "functions of its own": _OF_VALUES,
    "a model in a model": _OF_VALUES,
}
"""Metrics that a caller may name for a kind's one output instead of the compiled ones."""


def compile_with(model: Any, specs: tuple[MetricSpec, ...]) -> None:
    """Compile a model again with metrics that a caller names, as a user of Keras would."""
    model.compile("sgd", model.loss, metrics=[_as_user_gives(spec) for spec in specs])


def _as_user_gives(spec: MetricSpec) -> Any:
    if spec.name.startswith(PACKAGE):
        name = spec.name.removeprefix(f"{PACKAGE}>")
        return {"Spread": sample_models.Spread, "Longest": sample_models.Longest}[name](name=name)
    if not spec.config:
        return spec.name
    return getattr(keras.metrics, spec.name)(**{"name": spec.name, **spec.config})
