"""Reads what ``.keras`` and ``.h5`` files say of their models; what Keras 2 wrote is translated."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py

from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.architecture import fingerprint, renumbered_metrics
from understudy.evaluator.model.keras_version import is_archive_of_keras_2, is_hdf5_of_keras_2
from understudy.evaluator.model.loaders.keras_2 import (
    UntranslatableError,
    translated,
    translated_compilation,
)

_CONFIG: Final = "config.json"
_ASSETS: Final = "assets/"
_COMPILED: Final = {
    "loss": "keras.losses",
    "loss_weights": "keras.losses",
    "metrics": "keras.metrics",
    "weighted_metrics": "keras.metrics",
}
"""The arguments of ``compile`` that scoring needs, and the Keras modules of the classes that they name."""


SAVE_DIFFERENTLY: Final = "save it with Keras 3, or as a SavedModel"
"""What to do with a model of Keras 2 that cannot be translated."""


@dataclass(frozen=True, kw_only=True)
class StoredConfig:
    """A serialized model.

    Attributes:
        model: What `keras.saving.serialize_keras_object` returns for the model, but for ``compile_config``.
        compilation: The serialized arguments of ``compile``; empty if the model was not compiled.
        assets: The name, size and checksum of each asset.
        is_translated: Whether Keras 2 wrote it, so that Keras cannot read it from the file itself.
    """

    model: Mapping[str, Any]
    compilation: Mapping[str, Any]
    assets: tuple[tuple[str, int, int], ...] = ()
    is_translated: bool = False

    @property
    def fingerprint(self) -> str:
        """See `understudy.evaluator.model.architecture.fingerprint`. Assets are part of traced functions and count.

        Raises:
            LoadError: It is no serialized model.
        """
        try:
            return fingerprint({**self.model, "compile_config": self.compilation}, self.assets)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise LoadError("the configuration of the model is not as Keras writes it") from error


def read_archive(model_file: Path) -> StoredConfig:
    """Read a ``.keras`` file.

    Raises:
        LoadError: It is damaged.
    """
    try:
        with zipfile.ZipFile(model_file) as archive:
            config = dict(json.loads(archive.read(_CONFIG)))
            compilation = dict(config.pop("compile_config", None) or {})
            members = archive.infolist()
        is_by_keras_2 = is_archive_of_keras_2(model_file)
    except (OSError, KeyError, ValueError, TypeError, RecursionError, zipfile.BadZipFile) as error:
        raise LoadError(f"{model_file.name} is not a whole .keras file: {first_line(error)}") from error
    assets = sorted((info.filename, info.file_size, info.CRC) for info in members if info.filename.startswith(_ASSETS))
    if is_by_keras_2:
        return _translated(model_file, config, compilation, tuple(assets))
    return StoredConfig(model=config, compilation=renumbered_metrics(compilation), assets=tuple(assets))


def read_hdf5(model_file: Path) -> StoredConfig:
    """Read a ``.h5`` file.

    Raises:
        LoadError: It is damaged.
    """
    model, training = (_attribute(model_file, name) for name in ("model_config", "training_config"))
    compilation = {name: training.get(name) for name in _COMPILED} if training else {}
    if is_hdf5_of_keras_2(model_file):
        return _translated(model_file, model, compilation)
    with_modules = {name: _with_module(value, _COMPILED[name]) for name, value in compilation.items()}
    return StoredConfig(model=model, compilation=renumbered_metrics(with_modules))


def _translated(
    model_file: Path,
    model: Mapping[str, Any],
    compilation: Mapping[str, Any],
    assets: tuple[tuple[str, int, int], ...] = (),
) -> StoredConfig:
    try:
        config, arguments = translated(model), translated_compilation(compilation, model) if compilation else {}
    except UntranslatableError as error:
        raise LoadError(f"{model_file.name} was saved by Keras 2, and {error}; {SAVE_DIFFERENTLY}") from error
    return StoredConfig(model=config, compilation=renumbered_metrics(arguments), assets=assets, is_translated=True)


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
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise LoadError(f"{model_file.name} is not a whole .h5 file: {first_line(error)}") from error
