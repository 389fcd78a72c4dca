"""SavedModel folders: numbered as for TensorFlow Serving, ``ckpt-N``, or with any other name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from google.protobuf.message import DecodeError

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.formats.format import Content
from understudy.checkpoints.formats.tensor_bundle import INDEX_SUFFIX, read_bundle
from understudy.checkpoints.inspection import inspect_structure
from understudy.checkpoints.kinds import ModelKind
from understudy.compat import parse_fingerprint

GRAPH_FILE = "saved_model.pb"
_FINGERPRINT = "fingerprint.pb"
_VARIABLES = Path("variables") / "variables"
_ASSETS = Path("assets")
KERAS_METADATA_FILE = "keras_metadata.pb"
"""What Keras 2 adds to a SavedModel: its losses and metrics. `tf.saved_model.save` does not."""
_OBJECT_OF_KERAS_2 = b"_tf_keras_"
_LARGEST_BUCKET = 2**63 - 1
_TEMPORARY = re.compile(r"_temp$|\.tmp")


class SavedModelFolder:
    """See `Format`. The fingerprint covers graph and variables; after it, only Keras 2 writes another file."""

    kind = ModelKind.SAVED_MODEL
    description = "SavedModel folders"
    settle_seconds = 0.0

    def find(self, directory: Path) -> Iterable[Path]:
        """See `Format`. The folder itself may be a SavedModel that is overwritten repeatedly."""
        folders = [directory, *(path for path in directory.iterdir() if not path.name.startswith("."))]
        return [folder for folder in folders if (folder / GRAPH_FILE).is_file()]

    def files(self, path: Path) -> Mapping[str, Path]:
        """See `Format`."""
        if not (path / GRAPH_FILE).exists():
            raise FileNotFoundError(f"{path} has no {GRAPH_FILE}")
        relative = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        whole = (file for file in relative if not any(_TEMPORARY.search(part) for part in file.parts))
        return {f"{self.kind.file_name}/{file.as_posix()}": path / file for file in whole}

    def stem(self, path: Path) -> str:
        """See `Format`."""
        return path.name

    def inspect(self, copy: Path) -> Content:
        """See `Format`."""
        inspect_structure(self.kind, copy)
        try:
            _check_fingerprint(copy)
            content = read_bundle(copy / _VARIABLES, *_hashes(copy))
        except ValueError as error:
            raise DamagedCheckpointError(f"{copy.name} is not a whole SavedModel: {error}") from error
        is_by_keras_2 = _OBJECT_OF_KERAS_2 in (copy / GRAPH_FILE).read_bytes()
        return replace(content, may_grow=is_by_keras_2 and not (copy / KERAS_METADATA_FILE).exists())


def _check_fingerprint(copy: Path) -> None:
    """Raise ValueError unless the variables match the fingerprint, which the writer adds last.

    The hash is FarmHash's Fingerprint64 of the index, of which TensorFlow gives the remainder of a division.
    TensorFlow writes fingerprints since 2.12; older SavedModels are not checked.
    """
    import tensorflow as tf

    try:
        expected = parse_fingerprint((copy / _FINGERPRINT).read_bytes()).checkpoint_hash
    except FileNotFoundError:
        return
    except DecodeError as error:
        raise ValueError(f"{_FINGERPRINT} cannot be read: {error}") from error
    index = copy.joinpath(f"{_VARIABLES}{INDEX_SUFFIX}")
    found = int(tf.strings.to_hash_bucket_fast(index.read_bytes(), _LARGEST_BUCKET)) if index.exists() else 0
    if found != expected % _LARGEST_BUCKET:
        raise ValueError("its variables are not those that its fingerprint is of")


def _hashes(copy: Path) -> Iterable[str]:
    """Yield the hash of each part of the model other than its variables."""
    others = (copy / KERAS_METADATA_FILE, *copy.joinpath(_ASSETS).rglob("*"))
    for file in sorted([copy / GRAPH_FILE, *(file for file in others if file.is_file())]):
        yield f"{file.relative_to(copy).as_posix()}:{hashlib.sha256(file.read_bytes()).hexdigest()}"
