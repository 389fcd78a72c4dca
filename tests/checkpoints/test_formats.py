"""Telling whole copies of other people's checkpoints from torn ones, and reading their steps."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testkit.polling import polled
from understudy.checkpoints import (
    Checkpoint,
    CheckpointGoneError,
    DamagedCheckpointError,
    FolderSource,
    ModelKind,
    open_local_checkpoint,
)
from understudy.checkpoints.formats import FORMATS, HDF5_SETTLE_SECONDS, Format
from understudy.checkpoints.formats.saved_model import KERAS_METADATA_FILE
from understudy.checkpoints.formats.tf_checkpoint import STATE_FILE

LONG_AGO = 1_000_000_000


def trained_model(steps: int) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(steps)
    model.set_weights([np.full(weight.shape, steps, np.float32) for weight in model.weights])
    return model


def save_weights(model: keras.Model, folder: Path, number: int) -> None:
    model.save_weights(folder / f"epoch-{number}.weights.h5")


def save_h5(model: keras.Model, folder: Path, number: int) -> None:
    model.save(folder / f"epoch-{number}.h5")


def save_managed(model: keras.Model, folder: Path, number: int) -> None:
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2).save(number)


def save_saved_model(model: keras.Model, folder: Path, number: int) -> None:
    tf.saved_model.save(model, str(folder / f"ckpt-{number}"))


Save = Callable[[keras.Model, Path, int], None]
SAVES: dict[ModelKind, Save] = {
    ModelKind.WEIGHTS: save_weights,
    ModelKind.HDF5: save_h5,
    ModelKind.TF_CHECKPOINT: save_managed,
    ModelKind.SAVED_MODEL: save_saved_model,
}


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_state_file_of_another_kind_does_not_hide_the_checkpoints(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    save_managed(trained_model(1), tmp_path, 7)
    (tmp_path / STATE_FILE).unlink()
    make(tmp_path / STATE_FILE)
    assert [path.name for path in format_of(ModelKind.TF_CHECKPOINT).find(tmp_path)] == ["ckpt-7"]


def format_of(kind: ModelKind) -> Format:
    return next(format_ for format_ in FORMATS if format_.kind is kind)


def set_long_ago(folder: Path) -> None:
    """Date all files back, so that none was written just now."""
    for path in folder.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, logical_cpus: tuple[str, ...]) -> dict[ModelKind, Path]:
    """Return, for every kind, a folder with the checkpoint number 9 of step 5 in it."""
    del logical_cpus
    folders = {}
    for kind, save in SAVES.items():
        folders[kind] = tmp_path_factory.mktemp(kind.value)
        save(trained_model(5), folders[kind], 9)
        set_long_ago(folders[kind])
    return folders


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


def source_of(folder: Path, tmp_path: Path) -> FolderSource:
    return FolderSource(folder, tmp_path / "staging", takes_variables=True)


def found_damaged(folder: Path, tmp_path: Path) -> Checkpoint:
    """Return the only checkpoint of a folder, which is not whole and has been left alone for long."""
    now = [0.0]
    source = FolderSource(folder, tmp_path / "staging", takes_variables=True, clock=lambda: now[0])
    assert polled(source) == []
    now[0] += 10
    (damaged,) = polled(source)
    return damaged


@pytest.mark.parametrize("kind", SAVES)
def test_a_checkpoint_is_taken_whole_with_its_kind_and_the_optimizers_step(
    saved: dict[ModelKind, Path], tmp_path: Path, kind: ModelKind
) -> None:
    (checkpoint,) = polled(source_of(saved[kind], tmp_path))
    assert (checkpoint.kind, checkpoint.step, checkpoint.created_at) == (kind, 5, LONG_AGO)
    local = checkpoint.fetch(tmp_path / "pinned" / "5")
    assert (local.kind, local.step) == (kind, 5)
    assert open_local_checkpoint(local.directory) == local
    assert format_of(kind).inspect(local.model_file).digest == checkpoint.digest


def without_optimizer(model: keras.Model) -> keras.Model:
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    return plain


@pytest.mark.parametrize("kind", SAVES)
def test_without_an_optimizer_the_step_is_the_number_in_the_name(
    theirs: Path, tmp_path: Path, logical_cpus: tuple[str, ...], kind: ModelKind
) -> None:
    del logical_cpus
    plain = without_optimizer(trained_model(5))
    if kind is ModelKind.TF_CHECKPOINT:
        tf.train.CheckpointManager(tf.train.Checkpoint(model=plain), str(theirs), max_to_keep=2).save(9)
    elif kind is ModelKind.SAVED_MODEL:
        plain.export(theirs / "9", verbose=False)
    else:
        SAVES[kind](plain, theirs, 9)
    set_long_ago(theirs)
    assert [checkpoint.step for checkpoint in polled(source_of(theirs, tmp_path))] == [9]


@pytest.mark.parametrize("kind", [kind for kind in SAVES if kind is not ModelKind.SAVED_MODEL])
def test_a_model_saved_twice_has_one_digest_and_another_model_another(
    tmp_path: Path, logical_cpus: tuple[str, ...], kind: ModelKind
) -> None:
    del logical_cpus
    model = trained_model(5)
    digests = []
    for name in ("one", "two", "other"):
        if name == "other":
            model.set_weights([weight + 1 for weight in model.get_weights()])
        folder = tmp_path / name
        folder.mkdir()
        SAVES[kind](model, folder, 9)
        set_long_ago(folder)
        digests += [checkpoint.digest for checkpoint in polled(source_of(folder, tmp_path / f"for-{name}"))]
    assert digests[0] == digests[1] != digests[2]


@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", SAVES)
def test_a_copy_with_a_file_cut_off_anywhere_is_damaged(
    saved: dict[ModelKind, Path], tmp_path: Path, kind: ModelKind, data: st.DataObject
) -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    format_ = format_of(kind)
    (path,) = format_.find(saved[kind])
    for name, origin in format_.files(path).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, copy / name)
    whole = format_.inspect(copy / kind.file_name)
    file = copy / data.draw(st.sampled_from(sorted(format_.files(path))))
    with file.open("r+b") as stream:
        stream.truncate(data.draw(st.integers(0, file.stat().st_size - 1)))
    if file.name == "fingerprint.pb":
        # No part of the model: cut off behind the hash, it still vouches for all of it.
        with contextlib.suppress(DamagedCheckpointError):
            assert format_.inspect(copy / kind.file_name) == whole
        return
    with pytest.raises(DamagedCheckpointError, match="is not a whole"):
        format_.inspect(copy / kind.file_name)


@pytest.mark.parametrize("kind", [ModelKind.TF_CHECKPOINT, ModelKind.SAVED_MODEL])
@pytest.mark.parametrize("part", ["index", "data"])
def test_an_index_and_data_of_two_saves_are_damage(
    saved: dict[ModelKind, Path], tmp_path: Path, kind: ModelKind, part: str
) -> None:
    format_, folder = format_of(kind), tmp_path / "mixed"
    shutil.copytree(saved[kind], folder)
    other = tmp_path / "other"
    other.mkdir()
    SAVES[kind](trained_model(6), other, 9)
    (path,), (other_path,) = format_.find(folder), format_.find(other)
    files, other_files = format_.files(path), format_.files(other_path)
    (name,) = (name for name in files if f".{part}" in name)
    shutil.copyfile(other_files[name], files[name])
    set_long_ago(folder)
    damaged = found_damaged(folder, tmp_path)
    with pytest.raises(DamagedCheckpointError, match="is not a whole"):
        damaged.fetch(tmp_path / "pinned")


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_file_without_checksums_is_left_alone_until_its_clock_has_ticked(
    saved: dict[ModelKind, Path], theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, hours: int
) -> None:
    """Whatever the difference of this machine's clock from that of the file's."""
    file = shutil.copyfile(saved[ModelKind.HDF5] / "epoch-9.h5", theirs / "epoch-9.h5")
    source = source_of(theirs, tmp_path)
    written = file.stat().st_mtime
    monkeypatch.setattr("time.time", lambda: written - hours * 3600)
    waited: list[float] = []

    def write_more(seconds: float) -> None:
        waited.append(seconds)
        os.utime(file, (written, written + 1))

    with monkeypatch.context() as writing:
        writing.setattr("time.sleep", write_more)
        assert polled(source) == []
    assert waited == [HDF5_SETTLE_SECONDS]
    assert [checkpoint.step for checkpoint in polled(source)] == [5]


def test_a_saved_model_of_keras_2_is_not_taken_without_the_file_that_it_adds_last(theirs: Path, tmp_path: Path) -> None:
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
    model.compile("sgd", "mse")
    model.save(theirs / "model-9")
    added, later = theirs / "model-9" / KERAS_METADATA_FILE, tmp_path / "later"
    added.rename(later)
    now = [0.0]
    source = FolderSource(theirs, tmp_path / "staging", clock=lambda: now[0])

    assert polled(source) == []
    now[0] += 4
    assert polled(source) == []
    later.rename(added)
    (checkpoint,) = polled(source)

    added.unlink()  # a model that `tf.saved_model.save` wrote has none
    assert polled(source) == [checkpoint]
    now[0] += 6
    (without,) = polled(source)
    assert without.digest != checkpoint.digest


def test_an_h5_file_of_weights_alone_is_told_from_a_model(theirs: Path, tmp_path: Path) -> None:
    with h5py.File(theirs / "old-3.h5", "w") as file:
        file["dense/kernel"] = np.ones((2, 2))
    set_long_ago(theirs)
    damaged = found_damaged(theirs, tmp_path)
    assert damaged.step == 3
    with pytest.raises(DamagedCheckpointError, match=r"does not hold a whole model; weights alone are read from"):
        damaged.fetch(tmp_path / "pinned")


def test_a_manager_says_which_checkpoints_count(theirs: Path, tmp_path: Path, logical_cpus: tuple[str, ...]) -> None:
    del logical_cpus
    model = trained_model(1)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(theirs), max_to_keep=2)
    source = source_of(theirs, tmp_path)
    for step in (1, 2, 3):
        model.optimizer.iterations.assign(step)
        manager.save(step)
    checkpoint.write(str(theirs / "not-committed"))
    found = polled(source)
    assert [checkpoint.step for checkpoint in found] == [2, 3]
    for step in (4, 5, 6):
        manager.save(step)
    shutil.rmtree(tmp_path / "staging")
    with pytest.raises(CheckpointGoneError):
        found[0].fetch(tmp_path / "pinned")


@pytest.mark.parametrize("kind", [ModelKind.WEIGHTS, ModelKind.HDF5])
def test_a_file_with_a_hole_in_it_is_read_apart_and_damaged_or_whole(
    saved: dict[ModelKind, Path], tmp_path: Path, kind: ModelKind
) -> None:
    format_ = format_of(kind)
    (path,) = format_.find(saved[kind])
    chance = random.Random(7)  # noqa: S311 - no secrets here
    content = path.read_bytes()
    copy = tmp_path / kind.file_name
    damaged = 0
    for _ in range(6):
        start = chance.randrange(64, len(content) // 2)
        copy.write_bytes(content[:start] + bytes(4096) + content[start + 4096 :])
        try:
            format_.inspect(copy)
        except DamagedCheckpointError:
            damaged += 1
    assert damaged > 0
