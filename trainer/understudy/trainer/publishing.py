"""The chief's checkpoints: a regular model that loads anywhere, and the exact state for resuming."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import keras

from understudy.checkpoints import CheckpointPublisher
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.trainer.replica_state import average
from understudy.trainer.snapshot import Snapshot, write_snapshot


class ModelPublisher:
    """Publishes snapshots as checkpoints.

    Args:
        publisher: Writes into the run folder.
        model: A copy of the trained model, built outside any strategy's scope. The publisher owns it and overwrites its
            variables with every checkpoint.
    """

    def __init__(self, publisher: CheckpointPublisher, model: keras.Model) -> None:
        self._publisher = publisher
        self._model = model
        self._signature = signature_of(model)

    def publish(self, snapshot: Snapshot, *, epoch: int, final: bool, metrics: Mapping[str, float]) -> None:
        """Publish one checkpoint. When this returns it is committed.

        Raises:
            CheckpointError: From the publisher.
            OSError: Writing failed, for example on a full disk. Earlier checkpoints remain.
        """
        self._adopt(snapshot)

        def write(folder: Path) -> None:
            self._model.save(folder / MODEL_FILE)
            write_snapshot(folder, snapshot)

        self._publisher.publish(
            snapshot.step,
            write,
            epoch=epoch,
            final=final,
            metrics=metrics,
            signature=self._signature,
        )

    def _adopt(self, snapshot: Snapshot) -> None:
        for variable, value in zip(self._model.trainable_variables, snapshot.trained, strict=True):
            variable.assign(value)
        for variable, value in zip(self._model.optimizer.variables, snapshot.optimizer, strict=True):
            variable.assign(value)
        for variable, values in zip(self._model.non_trainable_variables, snapshot.replica, strict=True):
            variable.assign(average(variable, values))
