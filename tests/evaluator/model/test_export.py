from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner, Result

from testkit.in_process import until
from testkit.real_run import FEATURES, RealRun, dataset, step_model, wait_for_records
from understudy.checkpoints.keras_signature import signature_of
from understudy.cli.main import main

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return RealRun(tmp_path / "run")


def export(run: RealRun, *options: str | Path) -> Result:
    return CliRunner().invoke(main, ["export", "--run-dir", str(run.dir.root), *map(str, options)])


def exported(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_best_is_exported_after_the_trainer_has_deleted_it(run: RealRun, tmp_path: Path) -> None:
    run.publish(1, 4, 9)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 3)
        until(lambda: (run.dir.evaluator / "best.json").exists() and evaluator.best_step == 4)
    original = (run.dir.checkpoint(4) / "model.keras").read_bytes()
    with run.running(datasets=[dataset()]):  # a restart keeps it
        pass
    shutil.rmtree(run.dir.checkpoint(4))

    said = exported(export(run, "--output", tmp_path / "best.keras"))
    assert said == f"step 4 exported to {tmp_path / 'best.keras'}\n"
    assert (tmp_path / "best.keras").read_bytes() == original
    exported(export(run, "--step", "latest", "--output", tmp_path / "folder"))
    assert keras.saving.load_model(tmp_path / "folder" / "model.keras").get_weights()[1][0] == 9.0

    shutil.rmtree(run.dir.checkpoints)
    run.publish(2)  # by a training that began again, while the evaluator still holds the best of the one before
    exported(export(run, "--step", "latest", "--output", tmp_path / "anew"))
    assert keras.saving.load_model(tmp_path / "anew" / "model.keras").get_weights()[1][0] == 2.0


def test_a_saved_model_has_a_signature_by_name_and_gives_equal_outputs(run: RealRun, tmp_path: Path) -> None:
    model = two_by_two()

    def write(folder: Path) -> None:
        model.save(folder / "model.keras")

    run.publisher.publish(7, write, epoch=None, final=False, metrics={}, signature=signature_of(model))
    exported(export(run, "--step", "7", "--format", "saved_model", "--output", tmp_path / "models" / "7"))

    serve = tf.saved_model.load(str(tmp_path / "models" / "7")).signatures["serving_default"]
    random = np.random.default_rng(0)
    for rows in (1, 5, 64):
        image, size = (random.normal(size=(rows, FEATURES)).astype(np.float32) for _ in range(2))
        answers = serve(image=tf.constant(image), size=tf.constant(size))
        expected = model({"image": image, "size": size}, training=False)
        assert set(answers) == {"kind", "grade"}
        for name, answer in answers.items():
            np.testing.assert_array_equal(answer.numpy(), expected[name].numpy())


def two_by_two() -> keras.Model:
    """Two inputs, two outputs, BatchNorm and Dropout."""
    image, size = (keras.Input((FEATURES,), name=name) for name in ("image", "size"))
    both = keras.layers.Concatenate()([keras.layers.BatchNormalization()(image), size])
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4, activation="relu")(both))
    outputs = {"kind": keras.layers.Dense(3, activation="softmax")(hidden), "grade": keras.layers.Dense(1)(hidden)}
    model = keras.Model({"image": image, "size": size}, outputs)
    model.compile("adam", "mse")
    return model


def test_what_cannot_be_exported_is_said_in_one_line(run: RealRun, tmp_path: Path) -> None:
    output = tmp_path / "out.keras"
    refused = export(run, "--output", output)
    assert refused.exit_code == 1
    assert "no checkpoint is best yet" in refused.stderr
    assert "Give latest or a step, or start a server that scores them" in refused.stderr
    assert "no checkpoint of step 3; there are none" in export(run, "--step", "3", "--output", output).stderr
    run.publish(1, 2)
    assert "no checkpoint of step 3; there are [1, 2]" in export(run, "--step", "3", "--output", output).stderr
    (run.dir.checkpoint(2) / "model.keras").write_bytes(b"no model")
    assert "its manifest says" in export(run, "--step", "2", "--output", output).stderr
    assert not output.exists()
    exported(export(run, "--step", "1", "--output", output))
    assert "is there already" in export(run, "--step", "1", "--output", output).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.keras", "run"]


@pytest.mark.parametrize("flag", ["--run-dir", "--checkpoints"])
@pytest.mark.parametrize("command", ["export", "evaluate", "predict"])
def test_a_folder_that_does_not_exist_is_named(command: str, flag: str, tmp_path: Path) -> None:
    file, missing = tmp_path / "data.npz", tmp_path / "rnu"
    np.savez(file, x=np.zeros((1, FEATURES), np.float32))
    files = {"export": (), "evaluate": (str(file),), "predict": (str(file),)}[command]
    output = () if command == "evaluate" else ("--output", str(tmp_path / "out"))
    refused = CliRunner().invoke(main, [command, *files, flag, str(missing), *output])
    assert refused.exit_code == 2
    assert f"Invalid value for '{flag}': there is no folder '{missing}'; give the folder of the" in refused.stderr
    assert not missing.exists()


def test_an_export_needs_to_know_from_where(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["export", "--output", str(tmp_path / "x.keras")])
    assert refused.exit_code == 2
    assert "--run-dir" in refused.stderr


def test_the_exported_file_is_a_copy_of_its_own(run: RealRun, tmp_path: Path) -> None:
    run.publish(1, model=step_model(1))
    exported(export(run, "--step", "1", "--output", tmp_path / "a.keras"))
    assert (tmp_path / "a.keras").stat().st_nlink == 1


@pytest.mark.parametrize("version", ["10", "latest", "best"])
@pytest.mark.parametrize("command", ["export", "evaluate", "predict"])
def test_for_checkpoints_of_another_program_it_says_that_a_server_copies_them_first(
    command: str, version: str, tmp_path: Path
) -> None:
    source, state = tmp_path / "theirs", tmp_path / "state"
    source.mkdir()
    step_model(10).save(source / "10.keras")
    data = tmp_path / "data.npz"
    np.savez(data, x=np.zeros((1, FEATURES), np.float32), y=np.zeros((1, 1)))
    own = ["--step", version] if command == "export" else [data, "--version", version]
    output = [] if command == "evaluate" else ["--output", tmp_path / "out.keras"]
    arguments = [command, *own, *output, "--checkpoints", source, "--state-dir", state]
    refused = CliRunner().invoke(main, [str(each) for each in arguments])
    assert refused.exit_code == 1
    assert (
        f"the state folder {state} holds no checkpoint: this command reads the copies that `understudy serve "
        "--checkpoints` makes there. Start a server first, or give the state folder of one (--state-dir)"
    ) in refused.output
