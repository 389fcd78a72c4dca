"""Files at URLs that are read as local ones, without a folder of copies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import RemoteStorageError, StorageRefusalError
from understudy.checkpoints.pauses import doubling_pause
from understudy.checkpoints.remote.files import FileStatus, RemoteFiles, open_remote
from understudy.checkpoints.temporary_folders import TemporaryFolder

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 8.0


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file at a URL, as it was when it was found."""

    url: str
    status: FileStatus

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url


class RemoteReader:
    """Reads files at URLs. Thread-safe.

    The file that was read last is kept as a local copy, which has no name: it is gone with the process, however that
    ends. So there is room needed for one file for each thread that reads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: dict[str, RemoteFiles] = {}
        self._file: RemoteFile | None = None
        self._copy: int | None = None

    def __del__(self) -> None:
        self._forget()

    def find(self, url: str, suffixes: Collection[str]) -> list[RemoteFile]:
        """Return the file at a URL, or the files of a folder, sorted by name.

        Args:
            url: A file, if it ends in one of the suffixes, otherwise a folder.
            suffixes: Other files of a folder are left out, and so are the folders in it.

        Raises:
            FileNotFoundError: There is no such file.
            RemoteStorageError: The storage does not answer, or refuses.
            UnsupportedLocationError: No library that is installed reads such URLs.
        """
        endings = tuple(suffixes)
        if url.endswith(endings):
            folder, _, name = url.rpartition("/")
            return [RemoteFile(url=url, status=self._files(folder).status(name))]
        files = self._files(url.rstrip("/"))
        found = files.list(lambda names: [name for name in names if "/" not in name and name.endswith(endings)])
        return [RemoteFile(url=f"{files.url}/{name}", status=found[name]) for name in sorted(found)]

    @contextmanager
    def opened(self, file: RemoteFile | Path) -> Iterator[Path]:
        """Yield a path under which the file can be read meanwhile; that of a local file is its own.

        Raises:
            OSError: It is gone or has changed, the storage does not answer for some attempts, or refuses, or there is
                no room for the copy.
        """
        if isinstance(file, Path):
            yield file
            return
        with self._lock:
            if self._copy is None or self._file != file:
                self._forget()
                self._copy, self._file = self._fetched(file), file
            descriptor = os.dup(self._copy)
        try:
            yield Path(f"/dev/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def _forget(self) -> None:
        if self._copy is not None:
            os.close(self._copy)
        self._copy = self._file = None

    def _fetched(self, file: RemoteFile) -> int:
        failures = 0
        while True:
            try:
                return self._fetched_once(file)
            except StorageRefusalError:
                raise
            except RemoteStorageError:
                failures += 1
                if failures == _ATTEMPTS:
                    raise
            time.sleep(doubling_pause(failures - 1, first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS))

    def _fetched_once(self, file: RemoteFile) -> int:
        folder = file.url.removesuffix(f"/{file.name}")
        with TemporaryFolder() as place:
            target = place.path / file.name
            copied = self._files(folder).copy(file.name, target, size_bytes=file.status.size_bytes)
            if copied != file.status or target.stat().st_size != file.status.size_bytes:
                raise OSError(f"{file.url} has changed since it was first read; start again")
            return os.open(target, os.O_RDONLY)

    def _files(self, folder: str) -> RemoteFiles:
        if folder not in self._folders:
            self._folders[folder] = open_remote(folder)
        return self._folders[folder]
