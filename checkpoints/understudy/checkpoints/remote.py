"""Checkpoints on remote storage: ``gs://`` and the other file systems of `tf.io.gfile`."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from understudy.checkpoints.checkpoint_errors import UnsupportedLocationError
from understudy.checkpoints.folder_source import FolderSource
from understudy.checkpoints.formats.saved_model import GRAPH_FILE
from understudy.checkpoints.formats.tf_checkpoint import STATE_FILE
from understudy.checkpoints.fs import remove_folder, sweep
from understudy.checkpoints.layout import TEMPORARY_PREFIX
from understudy.checkpoints.signing import SIGNATURE_SUFFIX
from understudy.checkpoints.source import Checkpoint

_PATTERNS = ("*.keras", "*.h5", "*.index", "*.data-*-of-*", STATE_FILE, f"*{SIGNATURE_SUFFIX}")
"""The files of a folder that may be part of a checkpoint. Others, such as logs, are not fetched."""


class RemoteFolderSource:
    """A remote folder, which is mirrored to a local folder and read there; see `FolderSource`.

    Args:
        url: The folder, which need not exist yet.
        mirror: A private folder of this source for the copy. The first `fetch` creates it if it is missing.
        local: Reads the mirror.

    Raises:
        UnsupportedLocationError: TensorFlow cannot read such URLs.
    """

    def __init__(self, url: str, mirror: Path, local: FolderSource) -> None:
        self._url = url.rstrip("/")
        self._mirror = mirror
        self._local = local
        self._is_swept = False
        self._list()

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return self._local.is_complete

    def poll(self, wanted: Collection[int] = ()) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        if self.is_complete:
            self.fetch()
        return self._local.poll(wanted)

    def peek(self) -> object:
        """See `CheckpointSource`, and that of the mirror's source."""
        return self._local.peek()

    def fetch(self) -> None:
        """Update the mirror to the folder's current content. A file that changes meanwhile is fetched next time.

        Raises:
            OSError: The folder could not be read, or the mirror could not be written.
        """
        remote = self._list()
        self._mirror.mkdir(parents=True, exist_ok=True)
        if not self._is_swept:
            sweep(self._mirror)
            self._is_swept = True
        for name in _local_names(self._mirror) - remote.keys():
            (self._mirror / name).unlink()
        for folder in [path for path in self._mirror.iterdir() if path.is_dir() and not _local_names(path)]:
            remove_folder(folder)
        for name, status in remote.items():
            if _status_of(self._mirror / name) != status:
                self._copy(name, status)

    def _copy(self, name: str, status: _Status) -> None:
        import tensorflow as tf

        target = self._mirror / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._mirror / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with _as_os_errors(self._url):
                tf.io.gfile.copy(f"{self._url}/{name}", str(temporary))
                after = _Status.of(tf.io.gfile.stat(f"{self._url}/{name}"))
            if after == status and temporary.stat().st_size == status.size_bytes:
                os.utime(temporary, ns=(status.modified_ns, status.modified_ns))
                temporary.replace(target)
        except FileNotFoundError:
            return
        finally:
            temporary.unlink(missing_ok=True)

    def _list(self) -> dict[str, _Status]:
        import tensorflow as tf

        with _as_os_errors(self._url):
            if not tf.io.gfile.exists(self._url):
                return {}
            found = {}
            for name in self._names():
                with contextlib.suppress(tf.errors.NotFoundError):  # Deleted after it was listed.
                    found[name] = _Status.of(tf.io.gfile.stat(f"{self._url}/{name}"))
            return found

    def _names(self) -> Iterator[str]:
        """Yield the path of every file that may be part of a checkpoint, relative to the folder."""
        import tensorflow as tf

        for entry in sorted(name.rstrip("/") for name in tf.io.gfile.listdir(self._url)):
            folder = f"{self._url}/{entry}"
            if any(PurePosixPath(entry).match(pattern) for pattern in _PATTERNS):
                yield entry
            elif tf.io.gfile.exists(f"{folder}/{GRAPH_FILE}"):
                for parent, _, files in tf.io.gfile.walk(folder):
                    yield from (f"{parent}/{file}".removeprefix(f"{self._url}/") for file in files)


@dataclass(frozen=True, kw_only=True)
class _Status:
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, statistics: Any) -> _Status:
        return cls(size_bytes=int(statistics.length), modified_ns=int(statistics.mtime_nsec))


def _status_of(path: Path) -> _Status | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return _Status(size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _local_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Raise TensorFlow's file system errors as Python's."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.UnimplementedError as error:
        raise UnsupportedLocationError(
            f"TensorFlow cannot read {url}: {error.message}; mount it (s3:// with s3fs, say, or a CSI driver) and give "
            "the folder"
        ) from error
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(f"{url}: {error.message}") from error
    except tf.errors.OpError as error:
        raise OSError(f"{url} could not be read: {error.message}") from error
