"""Signatures of checkpoints that have no manifest, and the signing of checkpoints after they were written.

A detached signature is a file: the line of a signature, and the JSON document that was signed. That names the
checkpoint, its run, and the hash of each of its files. It is ``NAME.sig`` beside a file or beside the files with a
common prefix, and ``checkpoint.sig`` inside a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from understudy.checkpoints.atomic import encode_json, write_bytes
from understudy.checkpoints.checkpoint_errors import UnsupportedFormatError, UntrustedCheckpointError
from understudy.checkpoints.formats import FORMATS, Format
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.checkpoints.manifest import (
    SIGNATURE_FILE,
    FileEntry,
    describe_file,
    encode_manifest,
    read_manifest,
    verify_files,
)
from understudy.checkpoints.signing import (
    LINE_BYTES,
    MANIFEST,
    SIGNATURE_SUFFIX,
    AcceptedKeys,
    Signer,
    SigningKey,
    run_name,
)

FILES = b"understudy files 1\n"
"""The purpose of a detached signature."""

INNER_NAME = "checkpoint.sig"
"""The name of a detached signature in a folder, and in a private copy."""

LARGEST_BYTES = 2**24


def detached_file(path: Path) -> Path:
    """Return where the signature of a checkpoint is, given its file, its folder or the prefix of its files."""
    return path / INNER_NAME if path.is_dir() else path.with_name(path.name + SIGNATURE_SUFFIX)


def check_detached(
    content: bytes | None, files: Mapping[str, str], accepted: AcceptedKeys, *, origin: Path, name: str | None
) -> None:
    """Check a detached signature.

    Args:
        content: The signature file, or None if there is none.
        files: The SHA-256 of each file, by its path in a private copy.
        accepted: The keys and the run.
        origin: The checkpoint, for error texts.
        name: The checkpoint's name; None if that was checked before.

    Raises:
        UntrustedCheckpointError: It is not signed as required.
    """
    if content is None:
        raise UntrustedCheckpointError(
            f"{origin} is not signed: there is no {detached_file(origin).name}; write it with understudy sign"
        )
    line, document = content[:LINE_BYTES], content[LINE_BYTES:]
    accepted.check(document, line, FILES, origin=origin)
    signed = json.loads(document)
    accepted.check_run(signed["run"], origin=origin)
    if name not in (None, signed["name"]):
        raise UntrustedCheckpointError(f"{origin} has the signature of {signed['name']}")
    for path in sorted(files.keys() | signed["files"].keys()):
        if files.get(path) != signed["files"].get(path):
            raise UntrustedCheckpointError(f"{origin} is not what was signed: {path} was altered, added or removed")


def hashes(entries: tuple[FileEntry, ...]) -> dict[str, str]:
    """Return the hashes of files by their paths."""
    return {entry.path: entry.sha256 for entry in entries}


def sign_checkpoint(path: Path, key: SigningKey, *, run: str | None = None) -> Path:
    """Sign a checkpoint that is written completely; return the signature's file.

    Args:
        path: A committed checkpoint's folder, a ``.keras`` or ``.h5`` file, a SavedModel's folder, or the prefix of the
            files of `tf.train`.
        key: The private key.
        run: The name of the run; by default that of the run folder, else of the folder that holds ``path``.

    Raises:
        UnsupportedFormatError: It is no checkpoint.
        DamagedCheckpointError: It does not match its manifest.
        OSError: It could not be read, or the signature could not be written.
    """
    path = path.absolute()
    if (path / MANIFEST_FILE).exists():
        return _sign_manifest(path, Signer(key=key, run=run or run_name(path.parent.parent)))
    format_ = _format_of(path)
    files = format_.files(path)
    found = {
        name: describe_file(file.parent, file.name).sha256 for name, file in files.items() if file.name != INNER_NAME
    }
    document = encode_json({"name": path.name, "run": run or run_name(path.parent), "files": found})
    target = detached_file(path)
    write_bytes(target, key.sign(document, FILES) + document)
    return target


def _sign_manifest(path: Path, signer: Signer) -> Path:
    manifest = replace(read_manifest(path), run=signer.run)
    verify_files(path, manifest)
    content = encode_manifest(manifest)
    write_bytes(path / SIGNATURE_FILE, signer.key.sign(content, MANIFEST))
    write_bytes(path / MANIFEST_FILE, content)
    return path / SIGNATURE_FILE


def _format_of(path: Path) -> Format:
    for format_ in FORMATS:
        if any(found == path for folder in (path.parent, path) if folder.is_dir() for found in format_.find(folder)):
            return format_
    raise UnsupportedFormatError(f"{path} is no checkpoint; give its file, its folder or the prefix of its files")
