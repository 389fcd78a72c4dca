from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from testkit.training_harness import Dense
from understudy.experiments import ExperimentError
from understudy.trainer import ModelError
from understudy.trainer.model import build_model, prepare_for_replicas

BATCH_SPEC = (tf.TensorSpec((4, 2), tf.float32), tf.TensorSpec((4, 1), tf.float32))


class Building(Dense):
    """Builds what it is told to."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    def build_model(self) -> Any:
        return self._build()


def tiny(**compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(**{"loss": "mse", "optimizer": "sgd", **compiled})
    return model


def unbuilt() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse")
    return model


class Subclassed(keras.Model):  # type: ignore[misc]
    """Keras builds its layers when it is called, not by `build`."""

    def __init__(self, *, own: bool = False) -> None:
        super().__init__()
        self.dropout, self.dense = keras.layers.Dropout(0.1), keras.layers.Dense(1)
        self.scale = self.add_weight((), "ones") if own else None

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.dense(self.dropout(inputs))


def subclassed(*, own: bool = False) -> keras.Model:
    model = Subclassed(own=own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras': the layers stay without variables
        model.build((None, 2))
    model.compile(loss="mse")
    return model


def without_optimizer() -> keras.Model:
    model = tiny()
    model.optimizer = None
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: "a model", "returned a str; expected a keras.Model"),
        (lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), "not compiled"),
        (unbuilt, "without variables"),
        (subclassed, "without variables; give it an Input, or call it on an example"),
        (without_optimizer, "without an optimizer"),
        (lambda: tiny(run_eagerly=True), "run_eagerly"),
        (lambda: tiny(metrics=[keras.metrics.MeanSquaredError]), "cannot be saved with the model: MeanSquaredError"),
    ],
)
def test_a_model_that_the_loop_cannot_train_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(Building(build), seed=0)


@pytest.mark.parametrize(
    ("metric", "message"),
    [(3, "metric identifier: 3"), ("function", "metric identifier: function"), (None, "received `None`")],
)
def test_a_compiled_metric_that_keras_does_not_know_is_refused_by_name(metric: Any, message: str) -> None:
    strategy = tf.distribute.get_strategy()
    model = build_model(Building(lambda: tiny(metrics=["mae", metric])), seed=0)
    with pytest.raises(
        ModelError, match=f"cannot apply the model and its compiled loss and metrics .*{message}.*compile"
    ):
        prepare_for_replicas(model, strategy, BATCH_SPEC)


def test_a_model_of_which_a_part_gets_its_variables_with_the_first_batch_is_refused() -> None:
    model = build_model(Building(lambda: subclassed(own=True)), seed=0)
    with pytest.raises(ModelError, match=r"without all of its variables \(.*dense.*call it on an example"):
        prepare_for_replicas(model, tf.distribute.get_strategy(), BATCH_SPEC)


def test_training_data_of_batches_are_refused_with_what_helps() -> None:
    model = build_model(Building(tiny), seed=0)
    batched = tuple(tf.TensorSpec([8, *spec.shape], spec.dtype) for spec in BATCH_SPEC)
    with pytest.raises(ModelError, match=r"of training_data\(\) have an axis more .*: leave out batch\(\)"):
        prepare_for_replicas(model, tf.distribute.get_strategy(), batched)


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


@pytest.mark.parametrize(
    ("compiled", "arguments"),
    [({"loss": own_loss}, ["loss"]), ({"metrics": {"y": [own_loss]}}, ["metrics"]), ({"metrics": ["mae", "acc"]}, [])],
)
def test_a_loss_or_metric_that_the_evaluator_could_not_load_is_warned_of(
    caplog: pytest.LogCaptureFixture, compiled: dict[str, Any], arguments: list[str]
) -> None:
    build_model(Building(lambda: tiny(**compiled)), seed=0)
    warned = [record.__dict__ for record in caplog.records if "is not registered" in record.message]
    assert [each["argument"] for each in warned] == arguments
    assert all(each["reason"] == "Could not locate function 'own_loss'" for each in warned)


def test_what_the_users_code_raises_is_passed_on() -> None:
    with pytest.raises(ExperimentError, match=r"dense: build_model\(\) raised ZeroDivisionError"):
        build_model(Building(lambda: 1 // 0), seed=0)


class Misfit(keras.layers.Layer):  # type: ignore[misc]
    """Takes three columns, whatever it gets."""

    def call(self, inputs: Any) -> Any:
        return keras.ops.matmul(inputs, keras.ops.ones((3, 2)))


def test_an_error_of_keras_is_passed_on_without_styles_of_a_terminal() -> None:
    with pytest.raises(ExperimentError, match=r"build_model\(\) raised ValueError: .*Misfit.call") as raised:
        build_model(Building(lambda: keras.Sequential([keras.Input((5,)), Misfit()])), seed=0)
    assert "are 5 and 3" in str(raised.value)
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny(loss=keras.losses.MeanSquaredError("mean_with_sample_weight")), "divided by the sum"),
        (lambda: tiny(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)), "gradient_accumulation_steps"),
        (
            lambda: tiny(optimizer=keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2)),
            "ema_overwrite_frequency",
        ),
    ],
)
def test_what_several_replicas_would_get_wrong_is_refused(
    logical_cpus: tuple[str, ...], build: Callable[[], Any], message: str
) -> None:
    strategy = tf.distribute.MirroredStrategy(list(logical_cpus[:2]))
    with strategy.scope():
        model = build_model(Building(build), seed=0)
    with pytest.raises(ModelError, match=message):
        prepare_for_replicas(model, strategy, BATCH_SPEC)
