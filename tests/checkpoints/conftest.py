"""Run folders, folders of other programs, checkpoints in them, and ``.keras`` files made without Keras."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from understudy.checkpoints import CheckpointPublisher, FolderSource, Manifest, RunDir, Signature, TensorSpec

Publish = Callable[..., Manifest]
WriteKeras = Callable[..., Path]


def staged(tmp_path: Path) -> list[Path]:
    """Return the copies of checkpoints in the staging folder."""
    return [path for path in (tmp_path / "staging").iterdir() if path.name != "steps.json"]


def set_modified(path: Path, seconds: float) -> None:
    """Set when a file was modified, in seconds since the Unix epoch."""
    os.utime(path, (seconds, seconds))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def signature() -> Signature:
    return Signature(
        inputs=(TensorSpec(name="image", dtype="float32", shape=(None, 8, 8, 1)),),
        outputs=(TensorSpec(name="digit", dtype="float32", shape=(None, 10)),),
    )


@pytest.fixture
def publish(run: RunDir) -> Publish:
    """Publish a small checkpoint with a resume part of one step."""

    def write(folder: Path) -> None:
        (folder / "model.keras").write_bytes(b"the model " * 20)
        (folder / "resume").mkdir()
        (folder / "resume" / "state").write_bytes(b"the rest")

    def publish(step: int, *, keep: int = 100, final: bool = False) -> Manifest:
        publisher = CheckpointPublisher(run, keep=keep)
        return publisher.publish(step, write, epoch=step, final=final, metrics={"loss": 0.5}, signature=None)

    return publish


@pytest.fixture
def write_keras() -> WriteKeras:
    """Write a file as Keras 3 does: stored zip members in its order, all weights equal, the optimizer's count."""
    import h5py
    import numpy as np

    def write(path: Path, *, weight: float = 1.0, iterations: int | None = None, date: str = "today") -> Path:
        weights = io.BytesIO()
        with h5py.File(weights, "w") as file:
            file["layers/dense/vars/0"] = np.full((50, 10), weight, np.float32)
            if iterations is not None:
                file["optimizer/vars/0"] = np.int64(iterations)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", json.dumps({"date_saved": date}))
            archive.writestr("config.json", json.dumps({"class_name": "Sequential"}))
            archive.writestr("model.weights.h5", weights.getvalue())
        return path

    return write


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


@pytest.fixture
def source(folder: Path, tmp_path: Path, clock: Clock) -> FolderSource:
    return FolderSource(folder, tmp_path / "staging", clock=clock)
