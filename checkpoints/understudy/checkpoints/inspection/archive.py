"""Inspects ``.keras`` files: zip archives of ``config.json``, ``model.weights.h5``, ``metadata.json`` and assets."""

from __future__ import annotations

import hashlib
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from understudy.checkpoints.file_part import FilePart, start_of_member
from understudy.checkpoints.inspection import bounds
from understudy.checkpoints.inspection.hdf5 import OPTIMIZER_COUNTS, check_file, first_count, open_file

_CONFIG = "config.json"
_METADATA = "metadata.json"
_WEIGHTS = "model.weights.h5"

_BLOCK_BYTES = 1 << 20
_LOCAL_HEADER_BYTES = 30
_ENCRYPTED = 1


def inspect_archive(path: Path, *, content: bool) -> dict[str, Any]:
    """Check an archive, and with ``content`` read it all: its digest, and the number of its optimizer's steps.

    Raises:
        ValueError: It is damaged, exceeds a bound, or its weights refer to other files.
        zipfile.BadZipFile: It is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _check_members(members, start=archive.start_dir, file_bytes=path.stat().st_size)
        digest = _digest(archive, members) if content else None
        _check_config(archive)
        with _open_weights(archive, path) as weights, open_file(weights, _WEIGHTS) as file:
            check_file(file, archive.getinfo(_WEIGHTS).file_size)
            iterations = first_count(file, OPTIMIZER_COUNTS) if content else None
    return {"digest": digest, "iterations": iterations}


def _check_members(members: Sequence[zipfile.ZipInfo], *, start: int, file_bytes: int) -> None:
    """Check what the directory of an archive says, before anything is decompressed."""
    if len(members) > bounds.MAX_MEMBERS:
        raise ValueError(f"it holds {len(members)} files; at most {bounds.MAX_MEMBERS} were expected")
    names: set[str] = set()
    for member in members:
        _check_member(member)
        if member.filename in names:
            raise ValueError(f"it holds {member.filename!r} twice")
        names.add(member.filename)
    for name in (_CONFIG, _WEIGHTS):
        if name not in names:
            raise ValueError(f"it holds no {name}")
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        if member.header_offset < end:
            raise ValueError(f"{member.filename!r} overlaps another file in it")
        end = member.header_offset + _LOCAL_HEADER_BYTES + len(member.filename) + member.compress_size
    if end > start:
        raise ValueError("a file in it overlaps its directory")
    total, limit = sum(member.file_size for member in members), bounds.largest_content(file_bytes)
    if total > limit:
        raise ValueError(f"it has {file_bytes} bytes and would expand to {total}; at most {limit} were expected")


def _check_member(member: zipfile.ZipInfo) -> None:
    name = PurePosixPath(member.filename)
    if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename:
        raise ValueError(f"the name {member.filename!r} leads out of it")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise ValueError(f"{member.filename!r} is a symbolic link")
    if member.flag_bits & _ENCRYPTED:
        raise ValueError(f"{member.filename!r} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} is compressed by method {member.compress_type}, which Keras never uses")


def _digest(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> str:
    """Return the hash of all members but the date; reading them checks their CRCs."""
    digest = hashlib.sha256()
    for member in sorted(members, key=lambda member: member.filename):
        content = hashlib.sha256()
        for block in _read(archive, member):
            content.update(block)
        if member.filename != _METADATA:
            digest.update(f"{member.filename} {content.hexdigest()}\n".encode())
    return digest.hexdigest()


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield a member's whole content. It ends at the declared size, whatever the compressed data would expand to."""
    size = 0
    with archive.open(member) as file:
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            yield block
    if size != member.file_size:
        raise ValueError(f"{member.filename} has {size} bytes, its directory says {member.file_size}")


def _check_config(archive: zipfile.ZipFile) -> None:
    size = archive.getinfo(_CONFIG).file_size
    if size > bounds.LARGEST_CONFIG_BYTES:
        raise ValueError(f"{_CONFIG} has {size} bytes; at most {bounds.LARGEST_CONFIG_BYTES} were expected")
    bounds.parse_json(archive.read(_CONFIG), _CONFIG)


def _open_weights(archive: zipfile.ZipFile, path: Path) -> IO[bytes] | FilePart:
    """Open the weights for reading at any place; Keras does not compress them, other programs may."""
    member = archive.getinfo(_WEIGHTS)
    if member.compress_type == zipfile.ZIP_STORED:
        return FilePart(path, start_of_member(member, path), member.file_size)
    spool = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 - the caller closes it
    for block in _read(archive, member):
        spool.write(block)
    spool.seek(0)
    return spool
