"""Folders of foreign checkpoints on remote storage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from understudy.checkpoints.folder_source import FolderSource
from understudy.checkpoints.formats.saved_model import GRAPH_FILE
from understudy.checkpoints.formats.tf_checkpoint import STATE_FILE
from understudy.checkpoints.fs import remove_folder, sweep
from understudy.checkpoints.remote.files import RemoteFiles, local_status, mirror_file
from understudy.checkpoints.signing import SIGNATURE_SUFFIX
from understudy.checkpoints.source import Changes, Checkpoint

_PATTERNS = ("*.keras", "*.h5", "*.index", "*.data-*-of-*", STATE_FILE, f"*{SIGNATURE_SUFFIX}")
"""The files of a folder that may be part of a checkpoint. Others, such as logs, are not fetched."""


class RemoteFolderSource:
    """A remote folder, which is mirrored to a local folder and read there; see `FolderSource`.

    Args:
        files: The folder, which need not exist yet.
        mirror: A private folder of this source for the copy. The first `fetch` creates it if it is missing.
        local: Reads the mirror.
    """

    def __init__(self, files: RemoteFiles, mirror: Path, local: FolderSource) -> None:
        self._files = files
        self._mirror = mirror
        self._local = local
        self._is_swept = False

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return self._local.is_complete

    @property
    def missing(self) -> str:
        """See `CheckpointSource`. In a bucket there are no folders without files."""
        return ""

    @property
    def unread(self) -> str:
        """See `CheckpointSource`."""
        return self._local.unread

    @property
    def found(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        return self._local.found

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        """See `CheckpointSource`."""
        if self.is_complete:
            self.fetch()
        return self._local.poll(wanted)

    def peek(self) -> object:
        """See `CheckpointSource`, and that of the mirror's source."""
        return self._local.peek()

    def check(self) -> None:
        """Raise StorageRefusalError or another RemoteStorageError if the folder cannot be read now."""
        self._files.list(_chosen)

    def fetch(self) -> None:
        """Update the mirror to the folder's current content. A file that changes meanwhile is fetched next time.

        Raises:
            OSError: The folder could not be read, or the mirror could not be written.
        """
        remote = self._files.list(_chosen)
        self._mirror.mkdir(parents=True, exist_ok=True)
        if not self._is_swept:
            sweep(self._mirror)
            self._is_swept = True
        for name in _local_names(self._mirror) - remote.keys():
            (self._mirror / name).unlink()
        for folder in [path for path in self._mirror.iterdir() if path.is_dir() and not _local_names(path)]:
            remove_folder(folder)
        for name, status in remote.items():
            if local_status(self._mirror / name) != status:
                mirror_file(self._files, name, status, self._mirror / name)


def _chosen(names: Collection[str]) -> list[str]:
    """Return the names that may be of a part of a checkpoint."""
    known = {*names}
    return [name for name in names if _is_part(PurePosixPath(name), known)]


def _is_part(path: PurePosixPath, names: Collection[str]) -> bool:
    if len(path.parts) == 1:
        return any(path.match(pattern) for pattern in _PATTERNS)
    return f"{path.parts[0]}/{GRAPH_FILE}" in names


def _local_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
