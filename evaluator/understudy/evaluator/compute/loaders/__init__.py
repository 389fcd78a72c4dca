"""Building models from checkpoints and loading checkpoints into models: one module for each way to store a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.compute.loaders.hdf5_file import Hdf5Loader
from understudy.evaluator.compute.loaders.keras_file import KerasLoader
from understudy.evaluator.compute.loaders.loader import BuiltModel, ModelLoader
from understudy.evaluator.compute.loaders.saved_model import SavedModelLoader
from understudy.evaluator.compute.loaders.variables import VariablesLoader, assign_checkpoint, assign_weights
from understudy.evaluator.evaluator_errors import LoadError

BuildModel = Callable[[], Any]
"""Returns a new Keras model, built and perhaps compiled, as an experiment's ``build_model`` does."""


def loader_for(kind: ModelKind, build_model: BuildModel | None) -> ModelLoader:
    """Return what loads checkpoints of a kind.

    Args:
        kind: How the model is stored.
        build_model: Builds the model of checkpoints that hold variables alone.

    Raises:
        LoadError: It holds variables alone and nobody builds the model.
    """
    if kind is ModelKind.KERAS:
        return KerasLoader()
    if kind is ModelKind.HDF5:
        return Hdf5Loader()
    if kind is ModelKind.SAVED_MODEL:
        return SavedModelLoader()
    if build_model is None:
        raise LoadError("the checkpoint holds variables without their model; give the experiment that builds it")
    assign = assign_weights if kind is ModelKind.WEIGHTS else assign_checkpoint
    return VariablesLoader(kind, build_model, assign)


__all__ = ["BuildModel", "BuiltModel", "KerasLoader", "ModelLoader", "loader_for"]
