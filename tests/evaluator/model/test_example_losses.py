"""The losses of single examples: what Keras gives an example alone, where examples have losses of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from testkit import exactness, more_sample_models, sample_models
from understudy.evaluator.model.scorer import ScoreState
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import MetricSpec

ROWS = 7

MakeSlot = Callable[..., Slot]


@keras.saving.register_keras_serializable(sample_models.PACKAGE)  # type: ignore[untyped-decorator]
def loss_of_the_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.max(ops.abs(y_true - y_pred))


def score(slot: Slot, batch: Any, metrics: tuple[MetricSpec, ...] = ()) -> ScoreState:
    scorer = slot.scorer(metrics, example_losses=True)
    return scorer.update(scorer.start(), exactness.as_batch(slot, *batch))


@pytest.mark.parametrize(
    ("name", "weighted"),
    [
        ("image classifier", False),
        ("image classifier", True),
        ("two inputs, two outputs", True),
        ("outputs in a list", True),
        ("nested inputs and outputs", False),
        ("attention, weighted tokens", True),
        ("functions of its own", True),
        ("compute_metrics of its own", False),
        ("coupled examples", False),
        ("words", True),
    ],
)
def test_a_examples_loss_is_what_the_example_alone_adds_to_the_loss(
    make_slot: MakeSlot, name: str, *, weighted: bool
) -> None:
    kind = more_sample_models.KINDS[name]
    model = kind.build()
    slot = make_slot(model, replicas=2)
    (batch,) = exactness.draw(kind, 3, [ROWS], weighted=weighted)
    losses = score(slot, batch).example_losses
    assert losses is not None
    assert losses.shape == (ROWS,)
    x, y, *weights = batch
    predictions = model(x, training=False)
    expected = []
    for row in range(ROWS):
        parts = [sample_models.cut(part, row, row + 1) for part in (y, predictions, *weights)]
        expected.append(float(model._compile_loss(*parts)))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_mean_of_the_examples_is_the_loss_that_is_reported(make_slot: MakeSlot) -> None:
    slot = make_slot(sample_models.regression(), replicas=3)
    (batch,) = exactness.draw(sample_models.KINDS["regression"], 3, [ROWS], weighted=True)
    state = score(slot, batch)
    assert state.example_losses is not None
    assert slot.scorer(example_losses=True).result(state)["loss"] == pytest.approx(
        state.example_losses.mean(), rel=1e-6
    )
    assert score(slot, batch, (MetricSpec(name="mae"),)).example_losses == pytest.approx(state.example_losses)


def test_scores_are_the_same_with_and_without_them(make_slot: MakeSlot) -> None:
    slot = make_slot(sample_models.two_by_two(), replicas=3)
    (batch,) = exactness.draw(sample_models.KINDS["two inputs, two outputs"], 3, [ROWS], weighted=True)
    (plain,) = exactness.score_interleaved(slot, [[batch]])
    assert slot.scorer(example_losses=True).result(score(slot, batch)) == plain
    assert slot.scorer().update(slot.scorer().start(), exactness.as_batch(slot, *batch)).example_losses is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("compute_loss of its own", "way of its own"),
        ("test_step of its own", "way of its own"),
        ("adds a loss", "depend on whole batches"),
    ],
)
def test_a_model_whose_examples_have_no_losses_says_why(make_slot: MakeSlot, name: str, reason: str) -> None:
    kind = more_sample_models.KINDS[name]
    (batch,) = exactness.draw(kind, 3, [ROWS], weighted=False)
    state = score(make_slot(kind.build(), replicas=2), batch)
    assert state.example_losses is None
    assert reason in state.without_example_losses


@pytest.mark.parametrize(
    ("loss", "metrics", "reason"),
    [(loss_of_the_batch, (), "the batch as a whole"), (None, (MetricSpec(name="mae"),), "without a loss")],
)
def test_a_loss_that_examples_do_not_have_is_said(
    make_slot: MakeSlot, loss: Any, metrics: tuple[MetricSpec, ...], reason: str
) -> None:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", loss, metrics=["mae"])
    (batch,) = exactness.draw(sample_models.KINDS["regression"], 3, [ROWS], weighted=False)
    state = score(make_slot(model), batch, metrics)
    assert state.example_losses is None
    assert reason in state.without_example_losses
    assert np.isfinite(state.program.result(state.values)["mae"])  # type: ignore[union-attr, arg-type]
