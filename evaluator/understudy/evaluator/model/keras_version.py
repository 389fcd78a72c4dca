"""Which Keras saved a model, by what its file says. Without Keras and TensorFlow."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Final

import h5py

_METADATA: Final = "metadata.json"
_VERSION: Final = "keras_version"


def is_archive_of_keras_2(model_file: Path) -> bool:
    """Return whether Keras 2 saved a ``.keras`` file.

    Raises:
        OSError, ValueError, RecursionError, zipfile.BadZipFile: It is damaged.
    """
    with zipfile.ZipFile(model_file) as archive:
        named = _METADATA in archive.namelist()
        metadata = json.loads(archive.read(_METADATA)) if named else {}
    return isinstance(metadata, dict) and _is_2(metadata.get(_VERSION))


def is_hdf5_of_keras_2(model_file: Path) -> bool:
    """Return whether Keras 2 saved a ``.h5`` file.

    Raises:
        OSError: It is damaged.
    """
    with h5py.File(model_file, "r") as file:
        return _is_2(file.attrs.get(_VERSION))


def _is_2(version: object) -> bool:
    text = version.decode(errors="replace") if isinstance(version, bytes) else version
    return isinstance(text, str) and text.startswith("2.")
