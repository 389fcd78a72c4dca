"""Converts the model of a checkpoint to another format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from understudy.checkpoints.keras_signature import interface_of
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.library_errors import first_line
from understudy.evaluator.model.loaders import BuildModel, BuiltModel, loader_for
from understudy.evaluator.model.model_call import tensor_spec


def write_keras(checkpoint: LocalCheckpoint, file: Path, build_model: BuildModel | None) -> None:
    """Write a ``.keras`` file, compiled like the checkpoint's model, without the optimizer's state.

    Raises:
        LoadError: The model cannot be built, or Keras cannot store it.
    """
    if checkpoint.kind is ModelKind.SAVED_MODEL:
        raise LoadError(
            f"step {checkpoint.step} is stored as a SavedModel, of which no .keras file is made; export it as "
            "saved_model"
        )
    built = _build(checkpoint, build_model)
    try:
        if built.compile_config:
            built.model.compile_from_config(built.compile_config)
        built.model.save(file)
    except Exception as error:
        raise LoadError(f"step {checkpoint.step} cannot be written as a .keras file: {first_line(error)}") from error


def write_saved_model(checkpoint: LocalCheckpoint, folder: Path, build_model: BuildModel | None) -> None:
    """Write a SavedModel with one signature, ``serving_default``; a SavedModel is copied unchanged.

    Raises:
        LoadError: The model cannot be built, or TensorFlow cannot store it.
    """
    if checkpoint.kind is ModelKind.SAVED_MODEL:
        shutil.copytree(checkpoint.model_file, folder)
        return
    module, signature = _servable(_build(checkpoint, build_model).model)
    try:
        tf.saved_model.save(module, str(folder), signatures={"serving_default": signature})
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise LoadError(f"step {checkpoint.step} cannot be written as a SavedModel: {first_line(error)}") from error


def _build(checkpoint: LocalCheckpoint, build_model: BuildModel | None) -> BuiltModel:
    return loader_for(checkpoint.kind, build_model).build(checkpoint.model_file)


def _servable(model: Any) -> tuple[Any, Any]:
    """Return a module with the model and its serving function, and the function's signature for any batch size."""
    interface = interface_of(model)
    names = {_argument(spec.name): spec for spec in interface.inputs.specs}

    def serve(**inputs: Any) -> dict[str, Any]:
        leaves = {spec.name: inputs[argument] for argument, spec in names.items()}
        return interface.outputs.flatten(model(interface.inputs.unflatten(leaves), training=False))

    module = tf.Module()
    module.model = model
    module.serve = tf.function(serve, autograph=False)
    specs = {name: tensor_spec(spec) for name, spec in names.items()}
    return module, module.serve.get_concrete_function(**specs)


def _argument(name: str) -> str:
    """Return an input's name as a valid TensorFlow argument name."""
    return "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in name)
