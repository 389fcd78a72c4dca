"""What a malicious checkpoint is, and how one is put into a run folder.

Each writer gets a folder of its own for the model, and a file that must not appear. A `Harm` says in what the refusal
must be specific.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from understudy.checkpoints.fs import temporary_folder
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir
from understudy.checkpoints.manifest import Manifest, describe_file, encode_manifest, model_digest

Json = dict[str, Any]
Write = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Harm:
    """A malicious checkpoint: how it is stored, what the refusal must say, and what writes it."""

    kind: ModelKind
    refusal: str
    write: Write


HARMS: dict[str, Harm] = {}
"""By what they are."""


def harm(name: str, kind: ModelKind, refusal: str) -> Callable[[Write], Write]:
    """Add what a function writes to `HARMS`."""

    def register(write: Write) -> Write:
        HARMS[name] = Harm(kind, refusal, write)
        return write

    return register


def honest_model() -> Any:
    """Return the model that the malicious checkpoints pretend to hold."""
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, keras.layers.Dense(2, name="y")(inputs), name="honest")
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return model


def write_honest(file: Path) -> None:
    """Save that model, or its weights; the format follows from the name. It is the same file each time."""
    file.write_bytes(_saved(file.name))


@functools.cache
def _saved(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file, model = Path(folder, name), honest_model()
        if name.endswith(".weights.h5"):
            model.save_weights(file)
        else:
            model.save(file)
        return file.read_bytes()


def publish_malicious(run: RunDir, step: int, malicious: Harm, marker: Path) -> None:
    """Commit a malicious checkpoint to a run folder, with a manifest that describes it correctly."""
    with temporary_folder(run.checkpoint(step)) as folder:
        malicious.write(folder, marker)
        describe(folder, step, malicious.kind)
        folder.rename(run.checkpoint(step))


def describe(folder: Path, step: int, kind: ModelKind) -> None:
    """Write a manifest that describes the files of a folder correctly, as a writer does that is not to be trusted."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = tuple(describe_file(folder, name) for name in names)
    manifest = Manifest(
        step=step,
        epoch=None,
        created_at=time.time(),
        final=False,
        digest=model_digest(kind, files),
        kind=kind,
        files=files,
    )
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
