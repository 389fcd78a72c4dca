"""Files that TensorFlow reads: the file systems of `tf.io.gfile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from understudy.checkpoints.checkpoint_errors import (
    RemoteStorageError,
    StorageRefusalError,
    UnsupportedLocationError,
)
from understudy.checkpoints.remote.files import Choose, FileStatus, usable


class GfileFiles:
    """See `RemoteFiles`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        """See `RemoteFiles`."""
        return self._url

    def list(self, choose: Choose) -> Mapping[str, FileStatus]:
        """See `RemoteFiles`."""
        import tensorflow as tf

        with self._as_os_errors():
            if not tf.io.gfile.exists(self._url):
                return {}
            names = usable([*self._names()])
            found = {}
            for name in choose(names):
                with contextlib.suppress(tf.errors.NotFoundError):  # Deleted after it was listed.
                    found[name] = self._status(name)
            return found

    def status(self, name: str) -> FileStatus:
        """See `RemoteFiles`."""
        with self._as_os_errors(name):
            return self._status(name)

    def copy(self, name: str, target: Path, *, size_bytes: int) -> FileStatus:
        """See `RemoteFiles`."""
        import tensorflow as tf

        with self._as_os_errors(name):
            status = self._status(name)
            if status.size_bytes != size_bytes:
                return status
            tf.io.gfile.copy(f"{self._url}/{name}", str(target))
            return self._status(name)

    def _names(self) -> Iterator[str]:
        import tensorflow as tf

        for folder, _, files in tf.io.gfile.walk(self._url):
            below = folder.removeprefix(self._url).strip("/")
            yield from (f"{below}/{file}" if below else file for file in files)

    def _status(self, name: str) -> FileStatus:
        import tensorflow as tf

        statistics: Any = tf.io.gfile.stat(f"{self._url}/{name}")
        return FileStatus(size_bytes=int(statistics.length), modified_ns=int(statistics.mtime_nsec))

    @contextlib.contextmanager
    def _as_os_errors(self, name: str = "") -> Iterator[None]:
        import tensorflow as tf

        place = f"{self._url}/{name}" if name else self._url
        try:
            yield
        except tf.errors.UnimplementedError as error:
            raise UnsupportedLocationError(
                f"TensorFlow cannot read {place}: {error.message}; mount it and give the folder"
            ) from error
        except tf.errors.NotFoundError as error:
            raise FileNotFoundError(f"{place}: {error.message}") from error
        except (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError) as error:
            raise StorageRefusalError(f"{place} may not be read: {error.message}") from error
        except tf.errors.OpError as error:
            raise RemoteStorageError(f"{place} could not be read: {error.message}") from error
