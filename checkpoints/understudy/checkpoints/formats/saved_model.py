"""SavedModel folders: numbered ones, as TensorFlow Serving wants them, ``ckpt-N`` and any other name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

from understudy.checkpoints.errors import DamagedCheckpointError
from understudy.checkpoints.formats.format import Content
from understudy.checkpoints.formats.tensor_bundle import read_bundle
from understudy.checkpoints.kinds import ModelKind

GRAPH_FILE = "saved_model.pb"
_FINGERPRINT = "fingerprint.pb"
_VARIABLES = Path("variables") / "variables"
_ASSETS = Path("assets")
_TEMPORARY = re.compile(r"_temp$|\.tmp")


class SavedModelFolder:
    """See `Format`. The fingerprint is written last, and covers graph and variables."""

    kind = ModelKind.SAVED_MODEL
    description = "SavedModel folders"
    settle_seconds = 0.0

    def find(self, directory: Path) -> Iterable[Path]:
        """See `Format`. The folder itself may be one that is written over and over."""
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
        try:
            _check_fingerprint(copy)
            return read_bundle(copy / _VARIABLES, *_hashes(copy))
        except ValueError as error:
            raise DamagedCheckpointError(f"{copy.name} is not a whole SavedModel: {error}") from error


def _check_fingerprint(copy: Path) -> None:
    """Raise ValueError unless graph and variables are those that the writer, as its last act, took fingerprints of.

    TensorFlow has done so since 2.12; what is older goes unchecked.
    """
    from tensorflow.core.protobuf.fingerprint_pb2 import FingerprintDef
    from tensorflow.python.saved_model.pywrap_saved_model import fingerprinting

    if not (copy / _FINGERPRINT).exists():
        return
    try:
        stored = FingerprintDef.FromString((copy / _FINGERPRINT).read_bytes())
        found = FingerprintDef.FromString(fingerprinting.CreateFingerprintDef(str(copy)))
    except (RuntimeError, DecodeError, fingerprinting.FingerprintException) as error:
        raise ValueError(str(error)) from error
    if stored.saved_model_checksum != found.saved_model_checksum:
        raise ValueError(f"{GRAPH_FILE} is not the one that its fingerprint is of")
    if stored.checkpoint_hash != found.checkpoint_hash:
        raise ValueError("its variables are not those that its fingerprint is of")


def _hashes(copy: Path) -> Iterable[str]:
    """Give the hash of everything that makes the model beside its variables."""
    for file in sorted([copy / GRAPH_FILE, *(file for file in copy.joinpath(_ASSETS).rglob("*") if file.is_file())]):
        yield f"{file.relative_to(copy).as_posix()}:{hashlib.sha256(file.read_bytes()).hexdigest()}"
