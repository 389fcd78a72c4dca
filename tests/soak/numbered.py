"""Checkpoints that answer with their own number, so that the answering checkpoint can be identified."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import numpy.typing as npt

from understudy.checkpoints import MODEL_FILE, CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of

FEATURES = 16
OUTPUTS = 32

_WEIGHTS_FILE = "model.weights.h5"
_KERNEL = "layers/dense/vars/0"

Array = npt.NDArray[np.float32]


def ones(rows: int) -> Array:
    """Return examples ``[rows, 16]`` that the checkpoint of step N answers with N in each of its 32 outputs."""
    return np.ones((rows, FEATURES), np.float32)


class NumberedCheckpoints:
    """Publishes checkpoints into a run folder. Keras saves one model; the others are copies with other weights.

    Args:
        run: The run folder.
    """

    def __init__(self, run: RunDir) -> None:
        x = keras.Input((FEATURES,), name="x")
        y = keras.layers.Dense(OUTPUTS, name="y")(x)
        model: Any = keras.Model(x, y)
        model.compile("sgd", loss="mse", metrics=["mae"])
        self._signature = signature_of(model)
        self._publisher = CheckpointPublisher(run, keep=1_000_000)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / MODEL_FILE
            model.save(file)
            with zipfile.ZipFile(file) as archive:
                self._members = {name: archive.read(name) for name in archive.namelist()}

    def publish(self, step: int, *, final: bool = False) -> None:
        """Publish the checkpoint of a step."""
        self._publisher.publish(
            step,
            lambda folder: self._write(folder / MODEL_FILE, step),
            epoch=None,
            final=final,
            metrics={},
            signature=self._signature,
            versions={},
        )

    def _write(self, file: Path, step: int) -> None:
        weights = io.BytesIO(self._members[_WEIGHTS_FILE])
        with h5py.File(weights, "r+") as stored:
            stored[_KERNEL][...] = np.full((FEATURES, OUTPUTS), step / FEATURES, np.float32)
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in {**self._members, _WEIGHTS_FILE: weights.getvalue()}.items():
                archive.writestr(name, content)


def save_dataset(file: Path, *, rows: int) -> None:
    """Write examples of ones with targets of zero, on which step N has a mean squared error of N * N."""
    np.savez(file, allow_pickle=False, x=ones(rows), y=np.zeros((rows, OUTPUTS), np.float32))
