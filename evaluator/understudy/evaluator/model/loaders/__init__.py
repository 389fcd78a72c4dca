"""Builds models from checkpoints and loads checkpoints into models: one module for each kind of storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.loaders.keras_files import Hdf5Loader, KerasLoader
from understudy.evaluator.model.loaders.loader import BuiltModel, CheckedLoader, ModelLoader
from understudy.evaluator.model.loaders.tensorflow_files import (
    SavedModelLoader,
    VariablesLoader,
    assign_checkpoint,
    assign_weights,
)

BuildModel = Callable[[], Any]
"""Returns a new Keras model, built and optionally compiled, as an experiment's ``build_model`` does."""


def loader_for(kind: ModelKind, build_model: BuildModel | None, *, allow_unsafe_models: bool = False) -> ModelLoader:
    """Return the loader for checkpoints of a kind, which checks their files before it reads them.

    Args:
        kind: How the model is stored.
        build_model: Builds the model for checkpoints that hold only variables, or None.
        allow_unsafe_models: Whether a stored model may name any class, function and operation.

    Raises:
        LoadError: The checkpoint holds only variables and there is no ``build_model``.
    """
    loader = _loader_for(kind, build_model, safe_mode=not allow_unsafe_models)
    return CheckedLoader(loader, kind, allow_unsafe_models=allow_unsafe_models)


def _loader_for(kind: ModelKind, build_model: BuildModel | None, *, safe_mode: bool) -> ModelLoader:
    if kind is ModelKind.KERAS:
        return KerasLoader(safe_mode=safe_mode)
    if kind is ModelKind.HDF5:
        return Hdf5Loader(safe_mode=safe_mode)
    if kind is ModelKind.SAVED_MODEL:
        return SavedModelLoader()
    if build_model is None:
        raise LoadError("the checkpoint holds variables without their model; give the experiment that builds it")
    assign = assign_weights if kind is ModelKind.WEIGHTS else assign_checkpoint
    return VariablesLoader(kind, build_model, assign)


__all__ = ["BuildModel", "BuiltModel", "KerasLoader", "ModelLoader", "loader_for"]
