"""The manifest: it describes a checkpoint and holds the hashes to verify it.

``manifest.json`` is written last and commits the checkpoint. It holds a checksum of itself, so that a flipped bit is
detected in the manifest as well as in the files that it lists.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from understudy.checkpoints.atomic import decode_json, encode_json
from understudy.checkpoints.checkpoint_errors import (
    DamagedCheckpointError,
    UnsupportedFormatError,
    UntrustedCheckpointError,
)
from understudy.checkpoints.fs import open_within, read_within
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.checkpoints.low_priority import at_low_priority
from understudy.checkpoints.signature import Signature
from understudy.checkpoints.signing import LINE_BYTES, MANIFEST, SIGNATURE_SUFFIX, AcceptedKeys

FORMAT_VERSION = 1

SIGNATURE_FILE = MANIFEST_FILE + SIGNATURE_SUFFIX
"""The signature of a manifest, beside it."""

LARGEST_BYTES = 2**24
"""The most bytes of a manifest."""

LATEST_TIME = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Later times are no dates for Python and protobuf."""

_HASHED_AT_ONCE = 2**22
"""Bytes per call; large enough to release the GIL to other threads for milliseconds."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint; ``path`` is relative to its folder, with ``/`` between names."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint without opening its model.

    Attributes:
        step: Training steps taken when it was written.
        epoch: Epochs completed then; None if its writer does not count epochs.
        created_at: Seconds since the Unix epoch.
        final: Whether training ended with it.
        digest: Identifies the model: equal digests mean equal models. For a published checkpoint it is `model_digest`,
            for a foreign one the digest of its format's `Content`, without dates.
        metrics: Training metrics by name; may hold NaN.
        signature: The model's inputs and outputs; None if the writer did not record them.
        versions: Versions of the libraries that wrote it, by name.
        files: Every file except the manifest, including those of the model.
        kind: How the model is stored.
        run: The name of the run that it is signed for; None if it is not signed.
        format_version: The version of the manifest's format.
    """

    step: int
    epoch: int | None
    created_at: float
    final: bool
    digest: str
    files: tuple[FileEntry, ...]
    kind: ModelKind = ModelKind.KERAS
    metrics: Mapping[str, float] = field(default_factory=dict)
    signature: Signature | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None
    format_version: int = FORMAT_VERSION

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the checksum."""
        return {
            "format_version": self.format_version,
            "step": self.step,
            "epoch": self.epoch,
            "created_at": self.created_at,
            "final": self.final,
            "digest": self.digest,
            "kind": self.kind.value,
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "signature": None if self.signature is None else self.signature.as_json(),
            "versions": dict(self.versions),
            "run": self.run,
            "files": [
                {"path": entry.path, "size_bytes": entry.size_bytes, "sha256": entry.sha256} for entry in self.files
            ],
        }


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of ``manifest.json``."""
    fields = manifest.as_json()
    return encode_json({**fields, "checksum": _checksum(fields)})


def read_manifest(directory: Path, accepted: AcceptedKeys | None = None, *, origin: Path | None = None) -> Manifest:
    """Read the manifest of a checkpoint's folder, without reading the files that it lists.

    Args:
        directory: The folder.
        accepted: The keys of which one must have signed the manifest, and the run; None if it need not be signed.
        origin: The manifest's path in error texts, if not that in ``directory``.

    Raises:
        FileNotFoundError: There is no manifest: the checkpoint is not committed.
        UntrustedCheckpointError: It is not signed as required. Then it was not parsed.
        DamagedCheckpointError: It is not a manifest, or does not match its checksum.
        UnsupportedFormatError: Another version of this package wrote it.
    """
    path = directory / MANIFEST_FILE
    origin = path if origin is None else origin
    content = read_within(path, directory, limit=LARGEST_BYTES)
    if accepted is None:
        return decode_manifest(content, origin=origin)
    try:
        line = read_within(directory / SIGNATURE_FILE, directory, limit=LINE_BYTES)
    except FileNotFoundError:
        raise UntrustedCheckpointError(
            f"{origin} is not signed; sign it with understudy sign, and have the trainer sign with --sign-key"
        ) from None
    accepted.check(content, line, MANIFEST, origin=origin)
    manifest = decode_manifest(content, origin=origin)
    accepted.check_run(manifest.run, origin=origin)
    return manifest


def decode_manifest(content: bytes, *, origin: Path) -> Manifest:
    """Decode the result of `encode_manifest`. Errors name ``origin``. Raises as `read_manifest` does."""
    try:
        fields = decode_json(content)
        version = fields.get("format_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{origin} is not a manifest: {error}") from error
    if version != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{origin} has format version {version!r}, this program reads {FORMAT_VERSION}; use the version of "
            "understudy that wrote it",
        )
    found = fields.pop("checksum", None)
    try:
        if found != _checksum_as_written(content, found) and found != _checksum(fields):
            raise DamagedCheckpointError(f"{origin} does not match its own checksum {found!r:.80}")
        return _from_json(fields)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpointError(f"{origin} is not a manifest: {type(error).__name__}: {error}") from error


def read_published_manifest(
    directory: Path, accepted: AcceptedKeys | None = None, *, origin: Path | None = None
) -> Manifest:
    """Read the manifest of a checkpoint that another program published; see `read_manifest`.

    Scores belong to digests, so a digest of other files is refused: it would stand for a model that was not scored.
    """
    manifest = read_manifest(directory, accepted, origin=origin)
    expected = model_digest(manifest.kind, manifest.files)
    if manifest.digest != expected:
        raise DamagedCheckpointError(
            f"{origin or directory / MANIFEST_FILE} has the digest {manifest.digest}, and its files have {expected}"
        )
    return manifest


def model_digest(kind: ModelKind, files: Iterable[FileEntry]) -> str:
    """Return the digest of a published model: the SHA-256 of its file, or of the hashes of its files."""
    hashes = {entry.path: entry.sha256 for entry in files if kind.owns(entry.path)}
    if hashes.keys() == {kind.file_name}:
        return hashes[kind.file_name]
    return hashlib.sha256(encode_json(hashes)).hexdigest()


def describe_file(directory: Path, path: str) -> FileEntry:
    """Measure and hash one file of a folder. Raises as `open_within` does."""
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_HASHED_AT_ONCE))
    with open_within(directory / path, directory) as file:
        while count := file.readinto(piece):  # type: ignore[attr-defined]
            digest.update(piece[:count])
        return FileEntry(path=path, size_bytes=file.tell(), sha256=digest.hexdigest())


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Check that a folder holds every file that a manifest lists, with its size and hash.

    Raises:
        DamagedCheckpointError: A file is missing, or has another size or hash. The text names the first one.
    """
    verify_sizes(directory, manifest)
    for expected in manifest.files:
        path = directory / expected.path
        try:
            found = at_low_priority(functools.partial(describe_file, directory, expected.path))
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path} is missing, its manifest lists it") from None
        if found != expected:
            raise DamagedCheckpointError(f"{path} has SHA-256 {found.sha256}, its manifest says {expected.sha256}")


def verify_sizes(directory: Path, manifest: Manifest) -> None:
    """Check that a folder holds every file that a manifest lists, with its size; no file is opened.

    Raises:
        DamagedCheckpointError: A file is missing or has another size. The text names the first one.
    """
    for expected in manifest.files:
        path = directory / expected.path
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path} is missing, its manifest lists it") from None
        if size != expected.size_bytes:
            raise DamagedCheckpointError(f"{path} has {size} bytes, its manifest says {expected.size_bytes}")


def _checksum_as_written(content: bytes, found: object) -> str:
    """Return the checksum of the text without its checksum line, which is faster than encoding it again."""
    return hashlib.sha256(content.replace(f'  "checksum": "{found}",\n'.encode(), b"", 1)).hexdigest()


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode_json(fields)).hexdigest()


def _from_json(fields: Mapping[str, Any]) -> Manifest:
    files = tuple(_file_entry(entry) for entry in fields["files"])
    kind = ModelKind(fields.get("kind", ModelKind.KERAS.value))
    if not any(kind.owns(entry.path) for entry in files):
        raise ValueError(f"it lists no {kind.file_name}")
    signature = fields["signature"]
    epoch = fields["epoch"]
    created_at = float(fields["created_at"])
    if not 0 <= created_at < LATEST_TIME:
        raise ValueError(f"created_at is {created_at}")
    return Manifest(
        step=int(fields["step"]),
        epoch=None if epoch is None else int(epoch),
        created_at=created_at,
        final=bool(fields["final"]),
        digest=str(fields["digest"]),
        kind=kind,
        metrics={str(name): float(value) for name, value in fields["metrics"].items()},
        signature=None if signature is None else Signature.from_json(signature),
        versions={str(name): str(version) for name, version in fields["versions"].items()},
        run=None if fields.get("run") is None else str(fields["run"]),
        files=files,
    )


def _file_entry(fields: Mapping[str, Any]) -> FileEntry:
    path = PurePosixPath(str(fields["path"]))
    if "\0" in str(path):
        raise ValueError("a path holds a null character")
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"the path {str(path)!r} leads out of the checkpoint")
    size = int(fields["size_bytes"])
    if size < 0:
        raise ValueError(f"the size of {str(path)!r} is {size} bytes")
    return FileEntry(path=str(path), size_bytes=size, sha256=str(fields["sha256"]))
