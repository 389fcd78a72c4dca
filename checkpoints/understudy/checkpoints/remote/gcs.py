"""Objects in a bucket of Google Cloud Storage."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from understudy.checkpoints.checkpoint_errors import (
    RemoteStorageError,
    StorageRefusalError,
    UnsupportedLocationError,
)
from understudy.checkpoints.remote.files import GS_SCHEME, Choose, FileStatus, usable

_TIMEOUT: Final = (5.0, 20.0)
"""The seconds for a connection, and for an answer."""

_SLOWEST_BYTES_PER_SECOND = 2**16
_LEAST_COPY_SECONDS = 60.0
"""A copy that takes longer than both is given up."""

_LONGEST_TEXT = 500
"""The characters of an error of the library that are said; it may have the content of an object in it."""

_SHA256 = "understudy-sha256"
"""The metadata of an uploaded object that tells whether it need not be uploaded again."""


class GcsFiles:
    """See `RemoteStore`.

    Credentials come from where every program of Google takes them: ``GOOGLE_APPLICATION_CREDENTIALS``, gcloud's
    defaults, the service account of the machine or of the pod. No request is sent again here; the callers do that.

    Args:
        url: ``gs://BUCKET`` or ``gs://BUCKET/PATH``.

    Raises:
        UnsupportedLocationError: It names no bucket, or the library for it is not installed.
        StorageRefusalError: There are no credentials.
    """

    def __init__(self, url: str) -> None:
        place = url.removeprefix(GS_SCHEME).strip("/")
        self._url = GS_SCHEME + place
        bucket, _, path = place.partition("/")
        self._prefix = f"{path}/" if path else ""
        if not bucket:
            raise UnsupportedLocationError(f"{url} names no bucket; give gs://BUCKET/PATH")
        try:
            from google.cloud.storage import Client
        except ModuleNotFoundError as error:
            raise UnsupportedLocationError(
                f"{url} cannot be used without google-cloud-storage; install it with: pip install 'understudy[gcs]'"
            ) from error
        with self._as_os_errors():
            self._bucket: Any = Client().bucket(bucket)

    @property
    def url(self) -> str:
        """See `RemoteFiles`."""
        return self._url

    def list(self, choose: Choose) -> Mapping[str, FileStatus]:
        """See `RemoteFiles`."""
        with self._as_os_errors():
            blobs = self._bucket.list_blobs(prefix=self._prefix, timeout=_TIMEOUT, retry=None)
            found = {blob.name.removeprefix(self._prefix): _status(blob) for blob in blobs}
        return {name: found[name] for name in choose(usable(found))}

    def status(self, name: str) -> FileStatus:
        """See `RemoteFiles`."""
        with self._as_os_errors(name):
            return _status(self._loaded(name))

    def copy(self, name: str, target: Path, *, size_bytes: int) -> FileStatus:
        """See `RemoteFiles`."""
        until = time.monotonic() + max(_LEAST_COPY_SECONDS, size_bytes / _SLOWEST_BYTES_PER_SECOND)
        with self._as_os_errors(name):
            blob = self._loaded(name)
            status = _status(blob)
            if status.size_bytes == size_bytes:
                with target.open("xb") as file:
                    blob.download_to_file(
                        _Bounded(file, until, f"{self._url}/{name}"),
                        raw_download=True,
                        if_generation_match=blob.generation,
                        timeout=_TIMEOUT,
                        retry=None,
                    )
        return status

    def read(self, name: str, *, limit: int) -> bytes:
        """See `RemoteStore`."""
        with self._as_os_errors(name):
            blob = self._loaded(name)
            if blob.size > limit:
                raise RemoteStorageError(f"{self._url}/{name} has more than {limit} bytes")
            return bytes(
                blob.download_as_bytes(
                    raw_download=True, if_generation_match=blob.generation, timeout=_TIMEOUT, retry=None
                )
            )

    def upload(self, file: Path, name: str, *, sha256: str) -> None:
        """See `RemoteStore`."""
        with self._as_os_errors():
            known = self._bucket.get_blob(self._prefix + name, timeout=_TIMEOUT, retry=None)
            if known is not None and (known.size, (known.metadata or {}).get(_SHA256)) == (file.stat().st_size, sha256):
                return
            blob = self._blob(name)
            blob.metadata = {_SHA256: sha256}
            blob.upload_from_filename(str(file), timeout=_TIMEOUT, retry=None)

    def write(self, name: str, content: bytes) -> None:
        """See `RemoteStore`."""
        with self._as_os_errors():
            self._blob(name).upload_from_string(content, timeout=_TIMEOUT, retry=None)

    def create(self, name: str, content: bytes) -> bool:
        """See `RemoteStore`."""
        from google.api_core.exceptions import PreconditionFailed

        with self._as_os_errors():
            try:
                self._blob(name).upload_from_string(content, if_generation_match=0, timeout=_TIMEOUT, retry=None)
            except PreconditionFailed:
                return False
        return True

    def delete(self, names: Collection[str]) -> None:
        """See `RemoteStore`."""
        from google.api_core.exceptions import NotFound

        for name in names:
            with self._as_os_errors(), contextlib.suppress(NotFound):
                self._blob(name).delete(timeout=_TIMEOUT, retry=None)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    def _loaded(self, name: str) -> Any:
        """Return an object with what is known about it."""
        blob = self._blob(name)
        blob.reload(timeout=_TIMEOUT, retry=None)
        return blob

    @contextlib.contextmanager
    def _as_os_errors(self, name: str = "") -> Iterator[None]:
        """Raise the library's errors as Python's; with a name, one that is not found is that object."""
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError, TransportError
        from google.cloud.storage.exceptions import DataCorruption
        from requests import RequestException

        place = f"{self._url}/{name}" if name else self._url
        try:
            yield
        except (exceptions.NotFound, exceptions.Unauthorized, exceptions.Forbidden) as error:
            if name and isinstance(error, exceptions.NotFound):
                raise FileNotFoundError(f"there is no object {place}") from error
            raise StorageRefusalError(
                f"{place} is refused: {_text(error)}; check the bucket, and the credentials of Google Cloud"
            ) from error
        except (exceptions.GoogleAPIError, DataCorruption, TransportError, RequestException) as error:
            raise RemoteStorageError(f"{place}: {_text(error)}") from error
        except (GoogleAuthError, ValueError) as error:
            raise StorageRefusalError(
                f"{place} cannot be used: {_text(error)}; check the credentials of Google Cloud"
            ) from error


def _text(error: Exception) -> str:
    return str(error)[:_LONGEST_TEXT]


class _Bounded:
    """Writes to a file until a time."""

    def __init__(self, file: IO[bytes], until: float, place: str) -> None:
        self._file = file
        self._until = until
        self._place = place

    def write(self, piece: bytes) -> int:
        if time.monotonic() > self._until:
            raise RemoteStorageError(f"{self._place}: its bytes come too slowly")
        return self._file.write(piece)

    def tell(self) -> int:
        return self._file.tell()


def _status(blob: Any) -> FileStatus:
    """Return the status of an object. The part of its time below a second is made of its generation."""
    tag = int.from_bytes(hashlib.sha256(str(blob.generation).encode()).digest()[:8]) % 10**9
    return FileStatus(size_bytes=int(blob.size), modified_ns=int(blob.updated.timestamp()) * 10**9 + tag)
