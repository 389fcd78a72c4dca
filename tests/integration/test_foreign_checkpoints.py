"""Whole servers beside other people's training scripts, and scores that were missed and are filled in."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import httpx
import keras
import numpy as np
import pytest
from click.testing import CliRunner
from integration.conftest import Run

from testkit.checkpoints import OUTPUTS, Chief, ones, step_model, write_dataset
from testkit.in_process import until
from testkit.preloading import preloaded
from understudy.checkpoints import UnsupportedFormatError, UnsupportedLocationError, stable_copy
from understudy.cli.main import main
from understudy.clients import FailedPreconditionError, InvalidArgumentError, Metric, UnavailableError
from understudy.evaluator.evaluator_errors import ConfigurationError

pytestmark = pytest.mark.long

EXPERIMENT = """
import numpy as np
import tensorflow as tf
from testkit.checkpoints import OUTPUTS, WIDTH, step_model


class Theirs:
    name = "theirs"
    global_batch_size = 8

    def build_model(self):
        return step_model(0)

    def training_data(self):
        raise NotImplementedError

    def evaluation_data(self):
        examples = tf.data.Dataset.from_tensors((np.ones(WIDTH, np.float32), np.full(OUTPUTS, 3, np.float32)))
        return {"threes": examples}
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    (tmp_path / "theirs.py").write_text(EXPERIMENT)
    return f"{tmp_path / 'theirs.py'}:Theirs"


def test_weights_are_served_in_the_experiments_model(run_service: Run, theirs: Path, experiment: str) -> None:
    step_model(7).save_weights(theirs / "epoch-7.weights.h5")
    service = run_service({"checkpoints": theirs, "experiment": experiment})
    assert service.wait_ready() == 7
    client = service.client()
    evaluation = next(client.watch_evaluations())
    assert (evaluation.step, evaluation.dataset, evaluation.metrics["mae"]) == (7, "threes", 4.0)
    np.testing.assert_allclose(client.predict(ones(5)).output, np.full((5, OUTPUTS), 7), rtol=1e-6)


def test_inputs_without_names_are_told_and_taken_by_their_order(run_service: Run, theirs: Path) -> None:
    named, nameless = keras.Input((2,), name="wide"), keras.Input((2,))
    total = keras.layers.Subtract()([named, nameless])
    keras.Model([named, nameless], total).save(theirs / "epoch-1.keras")
    service = run_service({"checkpoints": theirs})
    service.wait_ready()
    client = service.client()

    metadata = client.metadata()
    assert [(spec.name, spec.positional) for spec in metadata.inputs] == [("wide", False), ("1", True)]
    assert [(spec.name, spec.positional) for spec in metadata.outputs] == [("outputs", True)]
    threes, ones_ = np.full((5, 2), 3, np.float32), np.ones((5, 2), np.float32)
    np.testing.assert_array_equal(client.predict([threes, ones_]).output, threes - ones_)
    np.testing.assert_array_equal(client.predict({"1": ones_, "wide": threes}).output, threes - ones_)
    with pytest.raises(InvalidArgumentError, match="Keras generated the names of '1', which are positions"):
        client.predict({"wide": threes, "keras_tensor_1": ones_})


def test_weights_without_an_experiment_end_the_service_with_the_remedy(run_service: Run, theirs: Path) -> None:
    step_model(7).save_weights(theirs / "epoch-7.weights.h5")
    with pytest.raises(UnsupportedFormatError, match="give the experiment that builds it"):
        run_service({"checkpoints": theirs})


def test_a_place_that_cannot_be_read_ends_the_service_with_the_alternative(run_service: Run) -> None:
    with pytest.raises(UnsupportedLocationError, match=r"cannot read other://bucket/run: .*; mount it"):
        run_service({"checkpoints": Path("other://bucket/run")})


def test_a_folder_that_is_none_ends_the_service(run_service: Run, theirs: Path) -> None:
    (theirs / "file").touch()
    with pytest.raises(ConfigurationError, match=r"the checkpoints' folder .*file cannot be read"):
        run_service({"checkpoints": theirs / "file"})


def test_a_file_that_this_machine_cannot_read_is_named_wherever_people_look(
    run_service: Run, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, _root: Path) -> BinaryIO:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    step_model(7).save(theirs / "epoch-7.keras")
    with monkeypatch.context() as patch:
        patch.setattr(stable_copy, "open_within", refuse)
        service = run_service({"checkpoints": theirs})
        client = service.client()
        reason = f"{theirs / 'epoch-7.keras'} cannot be read: [Errno 13] Permission denied"
        until(lambda: reason in client.status().problem)
        assert reason in httpx.get(f"http://{service.http}/readyz").json()["reason"]
        assert "New checkpoints may be missing" in httpx.get(f"http://{service.http}/").text
        said = CliRunner().invoke(main, ["status", "--target", service.grpc]).output
        assert f"new checkpoints may be missing: {reason}" in " ".join(said.split())
        assert service.metric("understudy_source_failures") > 0
        with pytest.raises(UnavailableError, match="cannot be read"):
            client.predict(ones(1))
    assert service.wait_ready() == 7
    until(lambda: not client.status().problem)
    assert service.metric("understudy_source_failures") == 0


def test_a_saved_model_is_scored_with_named_metrics_and_not_without(run_service: Run, theirs: Path) -> None:
    step_model(7).export(theirs / "7", verbose=False)
    service = run_service({"checkpoints": theirs})
    assert service.wait_ready() == 7
    client = service.client()
    batches = [(ones(5), np.full((5, OUTPUTS), 3, np.float32))]
    assert client.predict(ones(2)).step == 7
    with pytest.raises(FailedPreconditionError, match="no compile configuration"):
        client.evaluate(batches)
    result = client.evaluate(batches, metrics=[Metric(name="mae")])
    assert (result.step, result.examples, result.metrics) == (7, 5, {"mae": 4.0})


def test_what_was_missed_is_filled_in_step_by_step(run_service: Run, chief: Chief, tmp_path: Path) -> None:
    steps = (10, 20, 30, 40, 50)
    write_dataset(tmp_path / "test.npz", best_step=30)
    for step in steps:
        chief.publish(step)
    service = run_service({"eval_data": {"test": tmp_path / "test.npz"}}, {"evaluation_policy": "latest", "slots": 2})
    service.wait_ready()
    client = service.client()
    until(lambda: len(list(client.list_evaluations())) == len(steps))
    skipped = [evaluation.step for evaluation in client.list_evaluations() if evaluation.outcome == "skipped"]
    assert skipped == [10, 20, 30, 40]

    command = ["evaluate", "--dataset", "test", "--step", "30,10,30", "--target", service.grpc, "--json"]
    done = CliRunner().invoke(main, command)

    assert done.exit_code == 0, done.output
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # the rest is the log
    assert [result["step"] for result in results] == [30, 10, 30]
    assert results[0] == results[2]
    assert results[0]["metrics"]["loss"] < results[1]["metrics"]["loss"]
    scored = [evaluation.step for evaluation in client.list_evaluations() if evaluation.outcome == "scored"]
    assert scored == [50, 30, 10]
    assert client.status().serving_step == 50


SCRIPT = """
import sys

import keras
import numpy as np

first_epoch, others = int(sys.argv[1]), int(sys.argv[2])
for _ in range(others):  # moves the counters that Keras names things by
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    other.compile(loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.AUC()])
layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
model = keras.Sequential([keras.Input((4,)), *layers])
mae = keras.metrics.MeanAbsoluteError()
model.compile(keras.optimizers.SGD(0.01), loss=keras.losses.MeanSquaredError(), metrics=[mae])
x = np.random.default_rng(others).normal(size=(40, 4)).astype("float32")
save = keras.callbacks.ModelCheckpoint("theirs/{epoch:03d}." + sys.argv[3])
epochs = {"initial_epoch": first_epoch, "epochs": first_epoch + 2}
model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[save], **epochs)
"""


@pytest.mark.parametrize(("suffix", "second_epoch"), [("keras", 2), ("h5", 0), ("keras", 0)])
def test_a_plain_script_that_is_started_again_has_every_checkpoint_scored_and_the_newest_served(
    run_service: Run, theirs: Path, tmp_path: Path, suffix: str, second_epoch: int
) -> None:
    np.savez(tmp_path / "test.npz", x=np.ones((8, 4), np.float32), y=np.ones((8, 2), np.float32))
    (tmp_path / "train.py").write_text(SCRIPT)
    service = run_service({"checkpoints": theirs, "eval_data": {"test": tmp_path / "test.npz"}})
    for first_epoch, others in ((0, 0), (second_epoch, 3)):
        command = [sys.executable, "train.py", str(first_epoch), str(others), suffix]
        environ = {**os.environ, **preloaded()}
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stderr
        if not others:
            service.wait_ready()
            until(lambda: len(list(service.client().list_evaluations())) == 2)

    client = service.client()
    until(lambda: len(list(client.list_evaluations())) == 4)
    until(lambda: client.status().serving_step == 20)
    assert sorted(evaluation.step for evaluation in client.list_evaluations()) == [5, 10, 15, 20]
    assert [evaluation.outcome for evaluation in client.list_evaluations()] == ["scored"] * 4
    assert {tuple(sorted(evaluation.metrics)) for evaluation in client.list_evaluations()} == {
        ("loss", "mean_absolute_error")
    }
