"""Loads ``.keras`` files, and ``.h5`` files, the legacy format that ``ModelCheckpoint`` still writes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras

from understudy.checkpoints.file_part import start_of_member
from understudy.evaluator.evaluator_errors import LoadError, first_line
from understudy.evaluator.model.architecture import fingerprint, renumbered_metrics
from understudy.evaluator.model.loaders.loader import BuiltModel
from understudy.evaluator.model.weights import assign_from_hdf5

_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
_ASSETS = "assets/"
_COMPILED = {
    "loss": "keras.losses",
    "loss_weights": "keras.losses",
    "metrics": "keras.metrics",
    "weighted_metrics": "keras.metrics",
}
"""The arguments of ``compile`` that scoring needs, and the Keras modules of the classes that they name."""


def architecture_of(model_file: Path) -> str:
    """Return a fingerprint of everything that a traced function depends on, without building the model.

    If two files have equal fingerprints, the weights of one can be assigned to the variables of the other. Assets
    (vocabularies) are part of traced functions and count.

    Raises:
        LoadError: The file is not a ``.keras`` archive.
    """
    return fingerprint(*_read(model_file))


def read_compile_config(model_file: Path) -> dict[str, Any]:
    """Return the serialized compile arguments of the model; empty if it was not compiled.

    Raises:
        LoadError: The file is not a ``.keras`` archive.
    """
    config, _ = _read(model_file)
    return renumbered_metrics(config.get("compile_config") or {})


def build_model(model_file: Path, *, safe_mode: bool) -> Any:
    """Build the model with its weights in the current strategy's scope, not compiled; see `keras.saving.load_model`.

    Raises:
        LoadError: The file is damaged, or Keras refuses to build the model.
    """
    try:
        return keras.saving.load_model(model_file, compile=False, safe_mode=safe_mode)
    except Exception as error:
        raise LoadError(f"{model_file.name} cannot be built: {first_line(error)}") from error


def assign_weights(model: Any, model_file: Path) -> None:
    """Assign the weights in the file to the variables of a model of the same architecture.

    The checksum in the archive is not checked: the checkpoint's hash was verified before.

    Raises:
        LoadError: The file is damaged. Some variables may have been assigned.
    """
    try:
        with zipfile.ZipFile(model_file) as archive:
            info = archive.getinfo(_WEIGHTS)
        if info.compress_type == zipfile.ZIP_STORED:  # Keras does not compress
            assign_from_hdf5(model, model_file, start=start_of_member(info, model_file), size=info.file_size)
        else:
            model.load_weights(model_file)
    except Exception as error:
        raise LoadError(f"the weights of {model_file.name} cannot be assigned: {first_line(error)}") from error


def _read(model_file: Path) -> tuple[dict[str, Any], list[tuple[str, int, int]]]:
    try:
        with zipfile.ZipFile(model_file) as archive:
            config = json.loads(archive.read(_CONFIG))
            members = archive.infolist()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise LoadError(f"{model_file.name} is not a whole .keras file: {first_line(error)}") from error
    assets = sorted((info.filename, info.file_size, info.CRC) for info in members if info.filename.startswith(_ASSETS))
    return config, assets


class KerasLoader:
    """See `ModelLoader`.

    Args:
        safe_mode: Whether Keras refuses what it knows to be harmful.
    """

    def __init__(self, *, safe_mode: bool = True) -> None:
        self._safe_mode = safe_mode

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        return architecture_of(model_file)

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        model = build_model(model_file, safe_mode=self._safe_mode)
        return BuiltModel(model=model, compile_config=read_compile_config(model_file))

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        assign_weights(model, model_file)
        return True


class Hdf5Loader:
    """See `ModelLoader`.

    Args:
        safe_mode: Whether Keras refuses what it knows to be harmful.
    """

    def __init__(self, *, safe_mode: bool = True) -> None:
        self._safe_mode = safe_mode

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        return fingerprint({**_attribute(model_file, "model_config"), "compile_config": _compile_config(model_file)})

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        try:
            model = keras.saving.load_model(model_file, compile=False, safe_mode=self._safe_mode)
        except Exception as error:
            raise LoadError(f"{model_file.name} cannot be built: {first_line(error)}") from error
        return BuiltModel(model=model, compile_config=_compile_config(model_file))

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        try:
            model.load_weights(model_file)
        except Exception as error:
            raise LoadError(f"the weights of {model_file.name} cannot be assigned: {first_line(error)}") from error
        return True


def _compile_config(model_file: Path) -> dict[str, Any]:
    training = _attribute(model_file, "training_config")
    if not training:
        return {}
    return renumbered_metrics({name: _with_module(training.get(name), module) for name, module in _COMPILED.items()})


def _with_module(value: Any, module: str) -> Any:
    """Add the module of its class to every serialized object, as Keras does since version 3."""
    if isinstance(value, list):
        return [_with_module(item, module) for item in value]
    if not isinstance(value, dict):
        return value
    if "class_name" in value:
        return {"module": module, "registered_name": value["class_name"], **value}
    return {key: _with_module(item, module) for key, item in value.items()}


def _attribute(model_file: Path, attribute: str) -> dict[str, Any]:
    """Return a JSON attribute of the file; empty if there is none."""
    try:
        with h5py.File(model_file, "r") as file:
            return dict(json.loads(file.attrs.get(attribute, "{}")))
    except (OSError, ValueError) as error:
        raise LoadError(f"{model_file.name} is not a whole .h5 file: {first_line(error)}") from error
