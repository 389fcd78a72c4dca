"""What belongs to the compiled model (schedules, clipping, accumulation, mixed precision) works through the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit.training_harness import (
    BATCH,
    STEPS,
    Dense,
    assert_bit_equal,
    assert_one_architecture,
    interrupted,
    run,
    state_of,
    weights_of,
)
from understudy.checkpoints import RunDir
from understudy.checkpoints.layout import MODEL_FILE
from understudy.trainer import ModelError
from understudy.trainer.batches import global_batches
from understudy.trainer.data import plan_data
from understudy.trainer.loop import train_step_of
from understudy.trainer.model import build_model

MIRRORED = {"strategy": "mirrored", "devices": ("CPU:0", "CPU:1"), "cross_device_ops": "reduction_to_one_device"}
GROWTH_STEPS = 4


class Compiled(Dense):
    """A classifier with the optimizer and the dtype policy given."""

    name = "compiled"

    def __init__(self, make_optimizer: Callable[[], keras.optimizers.Optimizer], policy: str = "float32") -> None:
        self._make_optimizer = make_optimizer
        self._policy = policy

    def build_model(self) -> keras.Model:
        features = keras.Input((8,), name="features")
        hidden = keras.layers.Dense(16, activation="relu", dtype=self._policy)(features)
        kind = keras.layers.Dense(3, activation="softmax", dtype="float32")(hidden)
        model = keras.Model(features, kind)
        model.compile(self._make_optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def training_data(self) -> tf.data.Dataset:
        return super().training_data().map(lambda x, y, _: (x, y["kind"]))


def scheduled() -> keras.optimizers.Optimizer:
    schedule = keras.optimizers.schedules.CosineDecay(1e-1, STEPS)
    return keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=0.1)


def accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(1e-1, momentum=0.9, gradient_accumulation_steps=3)


def scaling() -> keras.optimizers.Optimizer:
    """Its first scale is too large for float16, so that some steps are skipped; then it grows again."""
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2, clipnorm=0.5), initial_scale=2.0**24, dynamic_growth_steps=GROWTH_STEPS
    )


SCHEDULED = Compiled(scheduled)
ACCUMULATING = Compiled(accumulating)
FLOAT16 = Compiled(scaling, "mixed_float16")
BFLOAT16 = Compiled(lambda: keras.optimizers.Adam(1e-2), "mixed_bfloat16")


@functools.cache
def fitted(experiment: Compiled) -> keras.Model:
    """Return what Keras' ``fit`` makes of the same batches on one device."""
    data = experiment.training_data()
    plan = plan_data(
        data, global_batch_size=BATCH, replicas=1, seed=0, shuffle_buffer=None, cache=False, keep_remainder=False
    )
    model = build_model(experiment, seed=0)
    model.fit(global_batches(data, plan, first_step=0), steps_per_epoch=STEPS, shuffle=False, verbose=0)
    return model


@pytest.fixture(scope="module")
def on_replicas(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Compiled], Path]:
    """Return a function that trains an experiment on two replicas, once, and returns the run folder."""

    @functools.cache
    def trained(experiment: Compiled) -> Path:
        run_dir = tmp_path_factory.mktemp("replicas")
        run(experiment, run_dir, checkpoint_every=4, **MIRRORED)
        return run_dir

    return trained


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Compiled], Path]:
    """Return a function that trains an experiment on one device, once, with a pause, and returns the run folder.

    The 4 steps before it end in the midst of an accumulation, and of the steps after which the loss scale grows.
    """

    @functools.cache
    def trained(experiment: Compiled) -> Path:
        run_dir = tmp_path_factory.mktemp("resumed")
        for steps in (4, STEPS):
            run(experiment, run_dir, steps=steps)
        return run_dir

    return trained


@pytest.mark.parametrize("experiment", [SCHEDULED, ACCUMULATING, FLOAT16, BFLOAT16])
def test_one_device_gives_the_bits_of_fit_and_resuming_gives_them_again(
    resumed: Callable[[Compiled], Path], experiment: Compiled
) -> None:
    run_dir, model = resumed(experiment), fitted(experiment)
    for ours, theirs in zip(weights_of(run_dir, STEPS), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    state = state_of(run_dir, STEPS)
    for index, variable in enumerate(model.optimizer.variables):
        np.testing.assert_array_equal(state[f"optimizer/{index}"], np.asarray(variable))
    assert_one_architecture(run_dir)


@pytest.mark.parametrize(("experiment", "tolerance"), [(SCHEDULED, 1e-5), (FLOAT16, 1e-3)])
def test_replicas_give_what_fit_gives_but_for_rounding_and_resume_exactly(
    tmp_path: Path, on_replicas: Callable[[Compiled], Path], experiment: Compiled, tolerance: float
) -> None:
    whole = on_replicas(experiment)
    assert run(experiment, interrupted(whole, 4, tmp_path), **MIRRORED).first_step == 4
    assert_bit_equal(state_of(whole, STEPS), state_of(tmp_path, STEPS))
    for ours, theirs in zip(weights_of(whole, STEPS), fitted(experiment).get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def test_replicas_skip_the_same_steps_that_overflow_as_one_device(on_replicas: Callable[[Compiled], Path]) -> None:
    ours = keras.models.load_model(RunDir(on_replicas(FLOAT16)).checkpoint(STEPS) / MODEL_FILE).optimizer
    theirs = fitted(FLOAT16).optimizer
    assert 0 < int(theirs.inner_optimizer.iterations) < STEPS, "some steps were skipped, others not"
    for one, other in ((ours, theirs), (ours.inner_optimizer, theirs.inner_optimizer)):
        assert int(one.iterations) == int(other.iterations)
    assert float(ours.dynamic_scale) == float(theirs.dynamic_scale)
    assert int(ours.step_counter) == int(theirs.step_counter)


def test_accumulating_on_several_replicas_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gradient_accumulation_steps, which TensorFlow cannot do on several replicas"):
        run(ACCUMULATING, tmp_path, **MIRRORED)


def test_the_published_model_goes_on_in_fit_where_the_loop_left_off(resumed: Callable[[Compiled], Path]) -> None:
    model: Any = keras.models.load_model(RunDir(resumed(ACCUMULATING)).checkpoint(4) / MODEL_FILE)
    data = ACCUMULATING.training_data()
    plan = plan_data(
        data, global_batch_size=BATCH, replicas=1, seed=0, shuffle_buffer=None, cache=False, keep_remainder=False
    )
    model.fit(global_batches(data, plan, first_step=4), steps_per_epoch=STEPS - 4, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), fitted(ACCUMULATING).get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Jitted(Compiled):
    """Asks for XLA."""

    def build_model(self) -> keras.Model:
        model = super().build_model()
        model.compile(self._make_optimizer(), "sparse_categorical_crossentropy", jit_compile=True)
        return model


JITTED = Jitted(lambda: keras.optimizers.SGD(1e-1))
PLAIN = Compiled(lambda: keras.optimizers.SGD(1e-1))


def test_xla_is_off_where_keras_would_switch_it_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.src.trainers.trainer.Trainer, "_resolve_auto_jit_compile", lambda _: True)
    assert PLAIN.build_model().jit_compile, "as where there is one GPU"
    assert not build_model(PLAIN, seed=0).jit_compile
    assert PLAIN.build_model().jit_compile, "elsewhere, Keras decides as before"
    assert build_model(JITTED, seed=0).jit_compile


def test_xla_that_is_asked_for_is_used_on_one_device(tmp_path: Path) -> None:
    assert getattr(train_step_of(build_model(JITTED, seed=0)), "_jit_compile")  # noqa: B009 - it is private
    run(JITTED, tmp_path / "xla")
    run(PLAIN, tmp_path / "plain")
    for ours, theirs in zip(weights_of(tmp_path / "xla", STEPS), weights_of(tmp_path / "plain", STEPS), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_xla_on_several_replicas_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="jit_compile=True, which TensorFlow cannot do under a strategy of several"):
        run(JITTED, tmp_path, **MIRRORED)
