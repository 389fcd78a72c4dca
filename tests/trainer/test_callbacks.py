"""Publishing from ``fit`` and from loops that people write themselves, with an evaluator that needs nothing else."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit.preloading import preloaded
from testkit.training_harness import Noisy
from understudy.checkpoints import MODEL_FILE, DirectoryLock, LockHeldError, RunDir, read_manifest, read_training_status
from understudy.evaluator.records.ledger import Ledger
from understudy.trainer import ModelError, ResumeError
from understudy.trainer.callbacks import PublishCheckpoint, newest_model, publish_model
from understudy.trainer.replica_state import ReplicaState

SERVE_OPTIONS = ("--grpc-port", "0", "--http-port", "0", "--exit-when-finished")


def fit(
    run_dir: Path, *, epochs: int = 2, extra: tuple[Any, ...] = (), eagerly: bool = True, **values: Any
) -> keras.Model:
    """Train with the callback; eagerly unless the step's graph matters, as it takes longer to trace than to train."""
    model = Noisy().build_model()
    model.run_eagerly = eagerly
    data = Noisy().training_data().batch(25)
    model.fit(data, epochs=epochs, callbacks=[*extra, PublishCheckpoint(run_dir, **values)], shuffle=False, verbose=0)
    return model


def finals(run_dir: Path) -> dict[int, bool]:
    run = RunDir(run_dir)
    return {step: read_manifest(run.checkpoint(step)).final for step in run.committed_steps()}


def state(run_dir: Path) -> str:
    status = read_training_status(RunDir(run_dir), now=0.0)
    assert status is not None
    assert "loss" in status.progress.metrics
    return status.state


def test_every_epoch_is_published_and_the_last_is_final(tmp_path: Path) -> None:
    model = fit(tmp_path, eagerly=False)
    assert finals(tmp_path) == {4: False, 8: True}
    manifest = read_manifest(RunDir(tmp_path).checkpoint(8))
    assert manifest.epoch == 2
    assert manifest.metrics.keys() == {"loss", "accuracy"}
    assert manifest.signature is not None
    assert [spec.name for spec in manifest.signature.inputs] == ["features"]
    status = read_training_status(RunDir(tmp_path), now=0.0)
    assert status is not None
    assert (status.state, status.final_step) == ("finished", 8)
    published = keras.models.load_model(RunDir(tmp_path).checkpoint(8) / MODEL_FILE)
    for one, other in zip(published.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_are_published_as_often_as_was_asked(tmp_path: Path) -> None:
    fit(tmp_path, save_freq=3)
    assert finals(tmp_path) == {3: False, 6: False, 8: True}


def test_a_training_that_another_callback_ends_has_a_final_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, epochs=9, extra=(keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1),))
    assert finals(tmp_path) == {4: False, 8: True}


def test_going_on_publishes_beside_what_is_there(tmp_path: Path) -> None:
    model = fit(tmp_path, epochs=1)
    data = Noisy().training_data().batch(25)
    model.fit(data, epochs=1, callbacks=[PublishCheckpoint(tmp_path)], shuffle=False, verbose=0)
    assert list(finals(tmp_path)) == [4, 8]


def test_a_script_that_begins_anew_in_the_folder_of_another_training_is_refused_before_it_trains(
    tmp_path: Path,
) -> None:
    """Its steps would be published among those of the other, and none of them would be served."""
    fit(tmp_path, save_freq=3)
    began: list[int] = []

    def note(batch: int, logs: Any) -> None:
        del logs
        began.append(batch)

    batches = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
    with pytest.raises(
        ResumeError, match="holds checkpoints up to step 8, and this training begins at step 0"
    ) as raised:
        fit(tmp_path, extra=(batches,), save_freq=5)
    assert f"keras.models.load_model(newest_model({str(tmp_path)!r}))" in str(raised.value)
    assert list(finals(tmp_path)) == [3, 6, 8]
    assert not began
    with pytest.raises(ResumeError, match="up to step 8, and this is step 7"):
        publish_model(Noisy().build_model(), tmp_path, step=7)
    with DirectoryLock(tmp_path):
        pass
    newest = newest_model(tmp_path)
    assert newest == RunDir(tmp_path).checkpoint(8) / MODEL_FILE
    gone_on = keras.models.load_model(newest)
    data = Noisy().training_data().batch(25)
    gone_on.fit(data, epochs=1, callbacks=[PublishCheckpoint(tmp_path)], shuffle=False, verbose=0)
    assert list(finals(tmp_path)) == [3, 6, 8, 12]


def test_before_the_first_checkpoint_there_is_no_newest_model(tmp_path: Path) -> None:
    assert newest_model(tmp_path / "missing") is None
    RunDir(tmp_path).checkpoint(3).mkdir(parents=True)
    assert newest_model(str(tmp_path)) is None


def test_a_fit_that_raises_leaves_a_training_that_failed(tmp_path: Path) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        fit(tmp_path, extra=(keras.callbacks.LambdaCallback(on_epoch_end=explode),))
    gc.collect()
    assert state(tmp_path) == "failed"
    fit(tmp_path)
    assert state(tmp_path) == "finished"


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(LockHeldError):
        fit(tmp_path)


def test_under_mirrored_strategy_the_replicas_are_averaged_and_go_on_unchanged(
    tmp_path: Path, logical_cpus: tuple[str, ...]
) -> None:
    operations = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(list(logical_cpus[:2]), cross_device_ops=operations)
    with strategy.scope():
        model = Noisy().build_model()
    data = Noisy().training_data().batch(50)
    model.fit(data, epochs=1, callbacks=[PublishCheckpoint(tmp_path)], shuffle=False, verbose=0)
    rows = [value for value in ReplicaState(strategy, model.non_trainable_variables).read() if value.shape == (2, 16)]
    published = keras.models.load_model(RunDir(tmp_path).checkpoint(2) / MODEL_FILE)
    norm = published.get_layer(index=2)
    for own, mean in zip(rows, (norm.moving_mean, norm.moving_variance), strict=True):
        assert not np.array_equal(own[0], own[1])
        np.testing.assert_allclose(own.mean(axis=0), mean.numpy(), rtol=1e-6)


def test_a_loop_of_one_s_own_publishes_with_a_function(tmp_path: Path) -> None:
    model = Noisy().build_model()
    manifest = publish_model(model, tmp_path, step=7, metrics={"loss": 0.5}, final=True)
    assert (manifest.step, manifest.final, dict(manifest.metrics)) == (7, True, {"loss": 0.5})
    assert finals(tmp_path) == {7: True}


def test_an_evaluator_needs_nothing_else(tmp_path: Path) -> None:
    model = fit(tmp_path / "run", epochs=2)
    ((x, y),) = Noisy().training_data().batch(100).as_numpy_iterator()
    np.savez(tmp_path / "test.npz", x=x, y=y)
    options = ("--run-dir", str(tmp_path / "run"), "--eval-data", f"test={tmp_path / 'test.npz'}")
    ended = subprocess.run(
        [sys.executable, "-m", "understudy.cli", "serve", *options, *SERVE_OPTIONS],
        env={**os.environ, **preloaded()},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "READY" in ended.stdout
    ledger = Ledger(RunDir(tmp_path / "run").evaluator / "ledger.sqlite")
    try:
        records = ledger.page(limit=10)
    finally:
        ledger.close()
    assert [record.step for record in records] == [4, 8]
    expected = model.evaluate(x, y, batch_size=100, verbose=0, return_dict=True)
    assert dict(records[-1].metrics) == pytest.approx(expected, rel=1e-5)


class Subclassed(keras.Model):  # type: ignore[misc]
    """Has its variables when it was called, not before."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)


@pytest.mark.filterwarnings("ignore:.build... was called:UserWarning")
def test_a_model_without_variables_is_refused(tmp_path: Path) -> None:
    subclassed = Subclassed()
    subclassed.build((None, 2))
    for model in (keras.Sequential([keras.layers.Dense(1)]), subclassed):
        with pytest.raises(ModelError, match="no variables yet"):
            publish_model(model, tmp_path, step=1)


@pytest.mark.parametrize("save_freq", [0, "batch", 2.5])
def test_a_frequency_that_is_none_is_refused(save_freq: Any) -> None:
    with pytest.raises(ValueError, match="'epoch' or a number of steps"):
        PublishCheckpoint("run", save_freq=save_freq)
