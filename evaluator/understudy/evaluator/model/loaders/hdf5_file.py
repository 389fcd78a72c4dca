"""Loads whole models from ``.h5`` files, Keras's legacy format that ``ModelCheckpoint`` still writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import keras

from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.library_errors import first_line
from understudy.evaluator.model.architecture import fingerprint, renumbered_metrics
from understudy.evaluator.model.loaders.loader import BuiltModel

_COMPILED = {
    "loss": "keras.losses",
    "loss_weights": "keras.losses",
    "metrics": "keras.metrics",
    "weighted_metrics": "keras.metrics",
}
"""The arguments of ``compile`` that scoring needs, and the Keras modules of the classes that they name."""


class Hdf5Loader:
    """See `ModelLoader`.

    Args:
        safe_mode: Whether Keras refuses what it knows to be harmful.
    """

    def __init__(self, *, safe_mode: bool = True) -> None:
        self._safe_mode = safe_mode

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        return fingerprint({**_read(model_file, "model_config"), "compile_config": _compile_config(model_file)})

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
    training = _read(model_file, "training_config")
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


def _read(model_file: Path, attribute: str) -> dict[str, Any]:
    """Return a JSON attribute of the file; empty if there is none."""
    try:
        with h5py.File(model_file, "r") as file:
            return dict(json.loads(file.attrs.get(attribute, "{}")))
    except (OSError, ValueError) as error:
        raise LoadError(f"{model_file.name} is not a whole .h5 file: {first_line(error)}") from error
