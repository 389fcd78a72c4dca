"""Checkpoints that answer with their own number, so that the answering checkpoint can be identified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from understudy.checkpoints import MODEL_FILE, CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of

FEATURES = 16
OUTPUTS = 32

Array = npt.NDArray[np.float32]


def ones(rows: int) -> Array:
    """Return examples ``[rows, 16]`` that the checkpoint of step N answers with N in each of its 32 outputs."""
    return np.ones((rows, FEATURES), np.float32)


class NumberedCheckpoints:
    """Publishes checkpoints into a run folder.

    Args:
        run: The run folder.
    """

    def __init__(self, run: RunDir) -> None:
        x = keras.Input((FEATURES,), name="x")
        y = keras.layers.Dense(OUTPUTS, name="y")(x)
        self._model: Any = keras.Model(x, y)
        self._model.compile("sgd", loss="mse", metrics=["mae"])
        self._signature = signature_of(self._model)
        self._publisher = CheckpointPublisher(run, keep=1_000_000)

    def publish(self, step: int, *, final: bool = False) -> None:
        """Publish the checkpoint of a step."""
        self._model.set_weights(
            [np.full((FEATURES, OUTPUTS), step / FEATURES, np.float32), np.zeros(OUTPUTS, np.float32)]
        )

        def write(folder: Path) -> None:
            self._model.save(folder / MODEL_FILE)

        self._publisher.publish(step, write, epoch=None, final=final, metrics={}, signature=self._signature)


def save_dataset(file: Path, *, rows: int) -> None:
    """Write examples of ones with targets of zero, on which step N has a mean squared error of N * N."""
    np.savez(file, allow_pickle=False, x=ones(rows), y=np.zeros((rows, OUTPUTS), np.float32))
