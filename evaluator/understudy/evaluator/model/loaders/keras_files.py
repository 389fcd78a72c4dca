"""Loads ``.keras`` files, and ``.h5`` files, the legacy format that ``ModelCheckpoint`` still writes."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import keras

from understudy.checkpoints.file_part import start_of_member
from understudy.compat import model_of_config
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.loaders.loader import BuiltModel
from understudy.evaluator.model.loaders.stored_config import SAVE_DIFFERENTLY, StoredConfig, read_archive, read_hdf5
from understudy.evaluator.model.weights import assign_from_hdf5

_WEIGHTS = "model.weights.h5"
_OF_TRAINING = ("optimizer/", "metrics/")


def _build(
    model_file: Path, stored: StoredConfig, load_weights: Callable[[Any, Path], None], *, safe_mode: bool
) -> BuiltModel:
    if stored.is_translated and stored.assets:
        raise LoadError(f"{model_file.name} was saved by Keras 2 and has vocabularies; {SAVE_DIFFERENTLY}")
    with _build_errors(model_file):
        if stored.is_translated:
            model = keras.saving.deserialize_keras_object(stored.model, safe_mode=safe_mode)
            load_weights(model, model_file)
        else:
            model = keras.saving.load_model(model_file, compile=False, safe_mode=safe_mode)
    return BuiltModel(model=model, compile_config=stored.compilation)


@contextlib.contextmanager
def _build_errors(model_file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise LoadError(f"{model_file.name} cannot be built: {first_line(error)}") from error


def _weights_in_place(model_file: Path) -> zipfile.ZipInfo | None:
    """Return the member with the weights if it is part of the file as it is, as Keras writes it; None if compressed.

    Raises:
        KeyError: There are no weights.
    """
    with zipfile.ZipFile(model_file) as archive:
        info = archive.getinfo(_WEIGHTS)
    return info if info.compress_type == zipfile.ZIP_STORED else None


def _assign_in_place(model: Any, model_file: Path, weights: zipfile.ZipInfo) -> None:
    assign_from_hdf5(model, model_file, start=start_of_member(weights, model_file), size=weights.file_size)


def assign_weights(model: Any, model_file: Path) -> None:
    """Assign the weights in the file to the variables of a model of the same architecture.

    The checksum in the archive is not checked: the checkpoint's hash was verified before.

    Raises:
        LoadError: The file is damaged. Some variables may have been assigned.
    """
    try:
        weights = _weights_in_place(model_file)
        if weights is None:
            model.load_weights(model_file)
        else:
            _assign_in_place(model, model_file, weights)
    except Exception as error:
        raise LoadError(f"the weights of {model_file.name} cannot be assigned: {first_line(error)}") from error


def _load_all_weights(model: Any, model_file: Path) -> None:
    """Load the weights of a model of Keras 2. Keras leaves some that are missing as they are, and only warns.

    Raises:
        ValueError: The file has fewer.
    """
    model.load_weights(model_file)
    found: list[str] = []
    with zipfile.ZipFile(model_file) as archive, archive.open(_WEIGHTS) as member, h5py.File(member) as file:
        file.visititems(lambda path, item: found.append(path) if isinstance(item, h5py.Dataset) else None)
    count = sum(not path.startswith(_OF_TRAINING) for path in found)
    if count < len(model.weights):
        raise ValueError(f"it has {count} variables, and the model {len(model.weights)}; {SAVE_DIFFERENTLY}")


class KerasLoader:
    """See `ModelLoader`.

    Args:
        safe_mode: Whether Keras refuses what it knows to be harmful.
    """

    def __init__(self, *, safe_mode: bool = True) -> None:
        self._safe_mode = safe_mode

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        return read_archive(model_file).fingerprint

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        stored = read_archive(model_file)
        with _build_errors(model_file):
            weights = _weights_in_place(model_file)
        if weights is None or stored.assets or stored.is_translated:
            return _build(model_file, stored, _load_all_weights, safe_mode=self._safe_mode)
        with _build_errors(model_file):
            model = model_of_config(stored.model, safe_mode=self._safe_mode)
            _assign_in_place(model, model_file, weights)
        return BuiltModel(model=model, compile_config=stored.compilation)

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
        return read_hdf5(model_file).fingerprint

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        return _build(model_file, read_hdf5(model_file), keras.Model.load_weights, safe_mode=self._safe_mode)

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        try:
            model.load_weights(model_file)
        except Exception as error:
            raise LoadError(f"the weights of {model_file.name} cannot be assigned: {first_line(error)}") from error
        return True
