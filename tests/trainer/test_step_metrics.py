"""The metrics of a parameter server's workers, added up."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit.training_harness import Dense
from understudy.trainer.model import build_model, prepare_for_replicas
from understudy.trainer.parameter_server.parameter_server_job import StepMetrics


class Scored(Dense):
    """Metrics of every kind: per output, weighted or not, a curve and a matrix beside simple means."""

    def build_model(self) -> keras.Model:
        model = super().build_model()
        model.compile(
            "sgd",
            loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
            metrics={"kind": ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False)], "size": ["mae", "r2_score"]},
            weighted_metrics={"kind": [keras.metrics.SparseTopKCategoricalAccuracy(2)]},
        )
        return model


def test_the_steps_states_added_up_give_the_metrics_of_all_their_examples() -> None:
    experiment = Scored()
    batches = experiment.training_data().batch(20, drop_remainder=True)
    model = build_model(experiment, seed=0)
    prepare_for_replicas(model, tf.distribute.get_strategy(), batches.element_spec)
    metrics = StepMetrics(model)

    @tf.function  # type: ignore[untyped-decorator] # TensorFlow ships no types
    def step(x: tf.Tensor, y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        y_pred = model(x)
        return model.compute_loss(x, y, y_pred, weights), metrics.state_after(y, y_pred, weights)

    for _ in range(2):
        for x, y, weights in batches:
            loss, state = step(x, y, weights)
            metrics.add(loss.numpy(), [value.numpy() for value in state])
        ours = metrics.results()
        metrics.reset()
    theirs = model.evaluate(batches, return_dict=True, verbose=0)
    named = {name: value for name, value in theirs.items() if name not in {"kind_loss", "size_loss"}}
    assert ours == pytest.approx(named, rel=1e-6)
    assert set(ours) >= {"loss", "kind_accuracy", "size_mae", "size_r2_score"}


def test_a_model_without_metrics_has_its_loss() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    metrics = StepMetrics(model)
    metrics.add(np.float32(1.0), [])
    metrics.add(np.float32(2.0), [])
    assert metrics.results() == {"loss": 1.5}
