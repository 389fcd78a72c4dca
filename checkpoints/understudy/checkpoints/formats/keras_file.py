"""Inspects a private copy of a ``.keras`` file without building its model.

A ``.keras`` file is a zip archive of ``config.json`` (the model), ``model.weights.h5`` (weights and optimizer, HDF5)
and ``metadata.json`` (the Keras version and the date).
"""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.formats.format import Content
from understudy.checkpoints.formats.hdf5_contents import OPTIMIZER_COUNTS, first_count

_CONFIG = "config.json"
_METADATA = "metadata.json"
_WEIGHTS = "model.weights.h5"

_BLOCK_BYTES = 1 << 20

_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,  # A part is missing.
    ValueError,
    RuntimeError,  # A flag claims encryption, or JSON nests without end.
)


def inspect(path: Path) -> Content:
    """Check that a ``.keras`` file is complete, including every checksum, and read its identity.

    Args:
        path: A file that does not change meanwhile. A temporary file as large as its weights is created beside it.

    Raises:
        DamagedCheckpointError: It is not a complete ``.keras`` file.
        OSError: It could not be read, or there is no space for the temporary file.
    """
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryFile(dir=path.parent) as weights:
            digest = hashlib.sha256()
            for member in sorted(archive.infolist(), key=lambda member: member.filename):
                content = hashlib.sha256()
                for block in _read(archive, member):
                    content.update(block)
                    if member.filename == _WEIGHTS:
                        weights.write(block)
                if member.filename != _METADATA:
                    digest.update(f"{member.filename} {content.hexdigest()}\n".encode())
            json.loads(archive.read(_CONFIG))
            archive.getinfo(_WEIGHTS)
            return Content(digest=digest.hexdigest(), iterations=_read_iterations(weights))
    except _DAMAGE as error:
        raise DamagedCheckpointError(f"{path.name} is not a whole .keras file: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpointError(f"{path.name} is not a whole .keras file: it points outside of itself") from error


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield a member's whole content; reading to the end checks its CRC."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed by method {member.compress_type}, which Keras never uses")
    size = 0
    with archive.open(member) as file:
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            yield block
    if size != member.file_size:
        raise ValueError(f"{member.filename} has {size} bytes, its directory says {member.file_size}")


def _read_iterations(weights: IO[bytes]) -> int | None:
    import h5py

    try:
        with h5py.File(weights, "r") as file:
            return first_count(file, OPTIMIZER_COUNTS)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{_WEIGHTS} cannot be read: {error}") from error
