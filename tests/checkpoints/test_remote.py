"""Folders that are not on a local disk; TensorFlow's memory file system stands for a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from understudy.checkpoints import DamagedCheckpointError, FolderSource, UnsupportedLocationError
from understudy.checkpoints.remote import RemoteFolderSource

from .conftest import WriteKeras


@pytest.fixture
def bucket() -> Iterator[str]:
    url = f"ram://{uuid.uuid4().hex}"
    yield url
    if tf.io.gfile.exists(url):
        tf.io.gfile.rmtree(url)


@pytest.fixture
def source(bucket: str, tmp_path: Path) -> RemoteFolderSource:
    return _source(bucket, tmp_path)


def _source(url: str, tmp_path: Path) -> RemoteFolderSource:
    return RemoteFolderSource(url, tmp_path / "mirror", FolderSource(tmp_path / "mirror", tmp_path / "staging"))


def _upload(file: Path, url: str) -> None:
    tf.io.gfile.makedirs(url.rpartition("/")[0])
    tf.io.gfile.copy(str(file), url, overwrite=True)


def _steps(source: RemoteFolderSource) -> list[int]:
    return [checkpoint.step for checkpoint in source.poll()]


def test_checkpoints_elsewhere_are_fetched_and_taken(
    bucket: str, source: RemoteFolderSource, tmp_path: Path, write_keras: WriteKeras
) -> None:
    assert _steps(source) == []
    file = write_keras(tmp_path / "a.keras", iterations=7)
    _upload(file, f"{bucket}/a.keras")
    _upload(file, f"{bucket}/train.log")
    (checkpoint,) = source.poll()
    assert checkpoint.step == 7
    assert checkpoint.fetch(tmp_path / "pinned").model_file.read_bytes() == file.read_bytes()
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["a.keras"]


def test_what_is_overwritten_or_deleted_there_is_so_here(
    bucket: str, source: RemoteFolderSource, tmp_path: Path, write_keras: WriteKeras
) -> None:
    _upload(write_keras(tmp_path / "a.keras", iterations=7), f"{bucket}/a.keras")
    assert _steps(source) == [7]
    _upload(write_keras(tmp_path / "a.keras", iterations=8, weight=2), f"{bucket}/a.keras")
    assert _steps(source) == [8]
    tf.io.gfile.remove(f"{bucket}/a.keras")
    assert _steps(source) == []


def test_saved_models_elsewhere_come_as_whole_folders(bucket: str, source: RemoteFolderSource, tmp_path: Path) -> None:
    module = tf.Module()
    module.weight = tf.Variable(0.0)
    for step in (3, 4):
        module.weight.assign(step)
        tf.saved_model.save(module, f"{bucket}/{step}")
    assert _steps(source) == [3, 4]
    tf.io.gfile.rmtree(f"{bucket}/3")
    source.fetch()
    assert sorted(path.name for path in (tmp_path / "mirror").iterdir()) == ["4"]


def test_a_copy_that_is_there_is_not_fetched_again(
    bucket: str, tmp_path: Path, write_keras: WriteKeras, monkeypatch: pytest.MonkeyPatch
) -> None:
    _upload(write_keras(tmp_path / "a.keras", iterations=7), f"{bucket}/a.keras")
    assert _steps(_source(bucket, tmp_path)) == [7]
    restarted = _source(bucket, tmp_path)
    monkeypatch.setattr(tf.io.gfile, "copy", None)
    assert _steps(restarted) == [7]


def test_a_scheme_that_tensorflow_lacks_is_refused_with_the_alternative(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLocationError, match=r"cannot read s3://bucket/run: .*; mount it"):
        _source("s3://bucket/run", tmp_path)


def test_a_number_above_the_highest_step_is_refused_by_name(
    bucket: str, source: RemoteFolderSource, tmp_path: Path, write_keras: WriteKeras
) -> None:
    _upload(write_keras(tmp_path / "a.keras", weight=1), f"{bucket}/model-{2**63}.keras")
    _upload(write_keras(tmp_path / "b.keras", weight=2, iterations=8), f"{bucket}/b.keras")
    (refused,) = [checkpoint for checkpoint in source.poll() if checkpoint.step != 8]
    with pytest.raises(DamagedCheckpointError, match=f"model-{2**63}.keras: the number {2**63} is above the highest"):
        refused.fetch(tmp_path / "pinned")


def test_a_second_source_on_the_same_mirror_deletes_nothing_before_it_polls(
    bucket: str, source: RemoteFolderSource, tmp_path: Path
) -> None:
    source.poll()
    half = tmp_path / "mirror" / ".tmp-half"
    half.touch()
    other = _source(bucket, tmp_path)
    assert half.exists()
    other.poll()
    assert not half.exists()
