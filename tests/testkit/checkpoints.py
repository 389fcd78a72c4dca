"""Real checkpoints whose predictions identify the step that computed them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE, RunDir
from understudy.checkpoints.publish import CheckpointPublisher
from understudy.checkpoints.signature import Signature
from understudy.checkpoints.signing import Signer

WIDTH = 4
OUTPUTS = 8


def step_model(step: int, *, width: int = WIDTH, deeper: bool = False) -> Any:
    """Return a compiled model that answers an example of ones with the step, in each of its outputs.

    Input ``x`` float32 ``[batch, width]``, output ``y`` float32 ``[batch, 8]``; optionally with one more layer.
    """
    x = keras.Input((width,), name="x")
    hidden = keras.layers.Rescaling(1.0)(x) if deeper else x
    model = keras.Model(x, keras.layers.Dense(OUTPUTS, use_bias=False, name="y")(hidden))
    model.layers[-1].set_weights([np.full((width, OUTPUTS), step / width, np.float32)])
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return model


def ones(rows: int) -> npt.NDArray[np.float32]:
    """Return examples for which a model answers with its step."""
    return np.ones((rows, WIDTH), np.float32)


class Chief:
    """Publishes checkpoints into a run folder, as a trainer does."""

    def __init__(self, run: Path, *, keep: int = 100, signer: Signer | None = None) -> None:
        self._path = run
        self._run = RunDir(run)
        self._signer = signer
        self._publisher = CheckpointPublisher(self._run, keep=keep, signer=signer)
        self._model = step_model(0)
        self._signature = signature_of(self._model)

    def publish(self, step: int) -> None:
        """Publish one checkpoint."""
        self._model.layers[-1].set_weights([np.full((WIDTH, OUTPUTS), step / WIDTH, np.float32)])
        self._publish(step, self._model, self._signature)

    def publish_damaged(self, step: int, damage: Callable[[Path], object]) -> None:
        """Publish one checkpoint whose model file was changed after its manifest was written.

        It is damaged beside the run folder: a service that runs sees it only damaged.
        """
        beside = Chief(self._path.with_name(f"{self._path.name}-damaged"), signer=self._signer)
        beside.publish(step)
        folder = beside._run.checkpoint(step)
        damage(folder / MODEL_FILE)
        folder.rename(self._run.checkpoint(step))

    def publish_other(self, step: int, model: Any) -> None:
        """Publish one checkpoint of another model."""
        self._publish(step, model, signature_of(model))

    def _publish(self, step: int, model: Any, signature: Signature) -> None:
        self._publisher.publish(
            step,
            lambda folder: model.save(folder / MODEL_FILE),
            epoch=None,
            final=False,
            metrics={},
            signature=signature,
        )


def write_dataset(file: Path, *, best_step: int) -> dict[str, npt.NDArray[np.float32]]:
    """Write 50 random examples as ``.npz``, with targets to which one step is closest; return them."""
    random = np.random.default_rng(7)
    x = random.normal(size=(50, WIDTH)).astype(np.float32)
    noise = random.normal(size=(50, OUTPUTS)).astype(np.float32)
    arrays = {"x": x, "y": x.sum(axis=1, keepdims=True) * np.float32(best_step / WIDTH) + noise}
    np.savez(file, allow_pickle=False, **arrays)
    return arrays
