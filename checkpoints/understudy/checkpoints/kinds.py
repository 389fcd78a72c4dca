"""How a checkpoint stores its model, and where the model is in a private folder."""

from __future__ import annotations

import enum

from understudy.checkpoints.layout import MODEL_FILE


class ModelKind(enum.Enum):
    """How a model is stored. The value is the one in a manifest.

    ``KERAS``, ``HDF5`` and ``SAVED_MODEL`` are whole models. The others hold only variables; the user's code must
    build their model.
    """

    KERAS = "keras"
    WEIGHTS = "weights"
    HDF5 = "h5"
    TF_CHECKPOINT = "tf_checkpoint"
    SAVED_MODEL = "saved_model"

    @property
    def file_name(self) -> str:
        """Its name in a private folder: that of a file or a folder, or the common prefix of several files."""
        return _FILE_NAMES[self]

    @property
    def is_whole(self) -> bool:
        """Whether it says how to build the model."""
        return self not in (ModelKind.WEIGHTS, ModelKind.TF_CHECKPOINT)

    @property
    def holds_metrics(self) -> bool:
        """Whether it says how the model was compiled: with which losses and metrics."""
        return self in (ModelKind.KERAS, ModelKind.HDF5)

    def owns(self, path: str) -> bool:
        """Return whether a file, by its path in the private folder, is part of the model."""
        return path.startswith((f"{self.file_name}.", f"{self.file_name}/")) or path == self.file_name


_FILE_NAMES = {
    ModelKind.KERAS: MODEL_FILE,
    ModelKind.WEIGHTS: "model.weights.h5",
    ModelKind.HDF5: "model.h5",
    ModelKind.TF_CHECKPOINT: "model.ckpt",
    ModelKind.SAVED_MODEL: "saved_model",
}
