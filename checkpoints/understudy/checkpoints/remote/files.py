"""The files below a URL, whichever library reads them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from understudy.checkpoints.checkpoint_errors import UnsupportedLocationError
from understudy.checkpoints.layout import TEMPORARY_PREFIX

Choose = Callable[[Collection[str]], Iterable[str]]
"""Chooses among the names of files, relative to the URL."""

S3_SCHEME = "s3://"
GS_SCHEME = "gs://"
STORE_SCHEMES = (S3_SCHEME, GS_SCHEME)


@dataclass(frozen=True, kw_only=True)
class FileStatus:
    """The size of a file, and a time in nanoseconds that changes when its content does."""

    size_bytes: int
    modified_ns: int


class RemoteFiles(Protocol):
    """The files below a URL. Thread-safe.

    Every call may raise RemoteStorageError: the storage does not answer, or refuses.
    """

    @property
    def url(self) -> str:
        """The URL, without a slash at its end."""

    def list(self, choose: Choose) -> Mapping[str, FileStatus]:
        """Return the chosen files by their names; none if there is no such folder."""

    def status(self, name: str) -> FileStatus:
        """Return the status of one file, or raise FileNotFoundError."""

    def copy(self, name: str, target: Path, *, size_bytes: int) -> FileStatus:
        """Write the content of a file to a new local file, and return the status of what was copied.

        A file of another size is not copied.

        Raises:
            FileNotFoundError: It is gone.
        """


class RemoteStore(RemoteFiles, Protocol):
    """Objects in a bucket, which can be written."""

    def read(self, name: str, *, limit: int) -> bytes:
        """Return the content of a small object.

        Raises:
            FileNotFoundError: There is none.
            RemoteStorageError: The storage does not answer, refuses, or the object has more than ``limit`` bytes.
        """

    def upload(self, file: Path, name: str, *, sha256: str) -> None:
        """Write an object, unless it is there already with this content.

        Raises:
            RemoteStorageError: The storage does not answer, or refuses.
            OSError: The file cannot be read.
        """

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, or replace it. Raise RemoteStorageError if that fails."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object if there is none of this name; return False if there is one.

        It may be this call that wrote it, if an answer was lost: compare the content. Raise RemoteStorageError if it
        is not known.
        """

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; those that do not exist are no error. Raise RemoteStorageError if that fails."""


def open_remote(url: str) -> RemoteFiles:
    """Return the files below a URL, without asking the storage.

    Raises:
        UnsupportedLocationError: No library that is installed reads such URLs.
        StorageRefusalError: There are no credentials, or settings that cannot be used.
    """
    if url.startswith(STORE_SCHEMES):
        return open_store(url)
    from understudy.checkpoints.remote.gfile import GfileFiles

    return GfileFiles(url)


def open_store(url: str) -> RemoteStore:
    """Return the objects below the URL of a bucket, without asking the storage.

    Raises:
        UnsupportedLocationError: It is no URL of a bucket, or the library for it is not installed.
        StorageRefusalError: There are no credentials, or settings that cannot be used.
    """
    if url.startswith(S3_SCHEME):
        from understudy.checkpoints.remote.s3 import S3Files

        return S3Files(url)
    if url.startswith(GS_SCHEME):
        from understudy.checkpoints.remote.gcs import GcsFiles

        return GcsFiles(url)
    raise UnsupportedLocationError(f"{url} is no bucket; give s3://BUCKET/PATH or gs://BUCKET/PATH")


def usable(names: Collection[str]) -> list[str]:
    """Return the names that may be those of files in a local folder, in order.

    A bucket may hold any text as a name: one that leads out of the folder, or a file where another name has a folder.
    """
    plain = {name for name in names if _is_plain(name)}
    folders = {str(parent) for name in plain for parent in PurePosixPath(name).parents}
    return sorted(plain - folders)


def mirror_file(files: RemoteFiles, name: str, status: FileStatus, target: Path) -> bool:
    """Replace a local file by a remote one atomically; return False if that has changed since it was listed.

    The copy gets the remote file's time, by which `local_status` knows it again.

    Raises:
        RemoteStorageError: The storage does not answer, or refuses.
        OSError: The copy cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        copied = files.copy(name, temporary, size_bytes=status.size_bytes)
        if copied != status or temporary.stat().st_size != status.size_bytes:
            return False
        os.utime(temporary, ns=(status.modified_ns, status.modified_ns))
        temporary.replace(target)
    except FileNotFoundError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def local_status(path: Path) -> FileStatus | None:
    """Return the status of a mirrored file, or None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return FileStatus(size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and str(path) == name and not path.is_absolute() and not {"..", "."} & {*path.parts}
