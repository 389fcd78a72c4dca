"""Objects in a bucket of S3, or of a store that speaks its protocol."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from understudy.checkpoints.checkpoint_errors import (
    RemoteStorageError,
    StorageRefusalError,
    UnsupportedLocationError,
)
from understudy.checkpoints.remote.files import S3_SCHEME, Choose, FileStatus, usable

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 20.0
_ATTEMPTS = 2
"""How often a request is sent in all. The callers try again, each after a longer wait."""

_SLOWEST_BYTES_PER_SECOND = 2**16
_LEAST_COPY_SECONDS = 60.0
"""A copy that takes longer than both is given up."""

_COPIED_AT_ONCE = 2**20
_DELETED_AT_ONCE = 1000

_SHA256 = "understudy-sha256"
"""The metadata of an uploaded object that tells whether it need not be uploaded again."""

_NO_KEY = {"NoSuchKey", "404"}
_EXISTS = {"PreconditionFailed", "412"}
_REFUSED = {
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidBucketName",
    "InvalidToken",
    "NoSuchBucket",
    "PermanentRedirect",
    "SignatureDoesNotMatch",
    "301",
    "401",
    "403",
}
"""The codes of errors that an operator must mend."""


class S3Files:
    """See `RemoteStore`.

    Credentials, the region and the address of another store come from where every program of AWS takes them:
    ``AWS_PROFILE``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, ``~/.aws``, the role of the machine or of the pod.

    Args:
        url: ``s3://BUCKET`` or ``s3://BUCKET/PATH``.

    Raises:
        UnsupportedLocationError: It names no bucket, or the library for it is not installed.
        StorageRefusalError: The settings of AWS cannot be used.
    """

    def __init__(self, url: str) -> None:
        place = url.removeprefix(S3_SCHEME).strip("/")
        self._url = S3_SCHEME + place
        self._bucket, _, path = place.partition("/")
        self._prefix = f"{path}/" if path else ""
        if not self._bucket:
            raise UnsupportedLocationError(f"{url} names no bucket; give s3://BUCKET/PATH")
        try:
            import boto3
            from botocore.config import Config
        except ModuleNotFoundError as error:
            raise UnsupportedLocationError(
                f"{url} cannot be read without boto3; install it with: pip install 'understudy[s3]'"
            ) from error
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        )
        with self._as_os_errors():
            self._client: Any = boto3.session.Session().client("s3", config=config)

    @property
    def url(self) -> str:
        """See `RemoteFiles`."""
        return self._url

    def list(self, choose: Choose) -> Mapping[str, FileStatus]:
        """See `RemoteFiles`."""
        found: dict[str, FileStatus] = {}
        with self._as_os_errors():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for page in pages:
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(self._prefix)
                    found[name] = _status(entry["Size"], entry)
        return {name: found[name] for name in choose(usable(found))}

    def status(self, name: str) -> FileStatus:
        """See `RemoteFiles`."""
        with self._as_os_errors(name):
            answer = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
        return _status(answer["ContentLength"], answer)

    def copy(self, name: str, target: Path, *, size_bytes: int) -> FileStatus:
        """See `RemoteFiles`."""
        until = time.monotonic() + max(_LEAST_COPY_SECONDS, size_bytes / _SLOWEST_BYTES_PER_SECOND)
        with self._as_os_errors(name):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            status = _status(answer["ContentLength"], answer)
            with contextlib.closing(answer["Body"]) as body:
                if status.size_bytes != size_bytes:
                    return status
                with target.open("xb") as file:
                    for piece in body.iter_chunks(_COPIED_AT_ONCE):
                        file.write(piece)
                        if time.monotonic() > until:
                            raise RemoteStorageError(f"{self._url}/{name}: {size_bytes} bytes come too slowly")
        return status

    def read(self, name: str, *, limit: int) -> bytes:
        """See `RemoteStore`."""
        with self._as_os_errors(name):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            with contextlib.closing(answer["Body"]) as body:
                content = bytes(body.read(limit + 1))
        if len(content) > limit:
            raise RemoteStorageError(f"{self._url}/{name} has more than {limit} bytes")
        return content

    def upload(self, file: Path, name: str, *, sha256: str) -> None:
        """See `RemoteStore`."""
        with self._as_os_errors(name):
            if self._uploaded(name) == (file.stat().st_size, sha256):
                return
            self._client.upload_file(
                str(file), self._bucket, self._prefix + name, ExtraArgs={"Metadata": {_SHA256: sha256}}
            )

    def write(self, name: str, content: bytes) -> None:
        """See `RemoteStore`."""
        with self._as_os_errors(name):
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content)

    def create(self, name: str, content: bytes) -> bool:
        """See `RemoteStore`."""
        with self._as_os_errors(name):
            try:
                self._client.put_object(
                    Bucket=self._bucket,
                    Key=self._prefix + name,
                    Body=content,
                    IfNoneMatch="*",
                    ContentType="text/plain",
                )
            except self._client.exceptions.ClientError as error:
                if _code(error) not in _EXISTS:
                    raise
                return False
        return True

    def delete(self, names: Collection[str]) -> None:
        """See `RemoteStore`."""
        keys = [{"Key": self._prefix + name} for name in names]
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            with self._as_os_errors():
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": keys[first : first + _DELETED_AT_ONCE], "Quiet": True}
                )
            for error in answer.get("Errors", ()):
                raise RemoteStorageError(f"{self._url}: {error['Key']} could not be deleted: {error.get('Message')}")

    def _uploaded(self, name: str) -> tuple[int, str | None] | None:
        """Return the size of an object and the hash that `upload` noted, or None if there is none."""
        try:
            answer = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
        except self._client.exceptions.ClientError as error:
            if _code(error) in _NO_KEY:
                return None
            raise
        return answer["ContentLength"], answer["Metadata"].get(_SHA256)

    @contextlib.contextmanager
    def _as_os_errors(self, name: str = "") -> Iterator[None]:
        """Raise the library's errors as Python's."""
        from boto3.exceptions import Boto3Error
        from botocore import exceptions

        place = f"{self._url}/{name}" if name else self._url
        try:
            yield
        except exceptions.ClientError as error:
            if name and _code(error) in _NO_KEY:
                raise FileNotFoundError(f"there is no object {place}") from error
            if _code(error) in _REFUSED:
                raise StorageRefusalError(
                    f"{place} is refused: {error}; check the bucket, and the credentials and region of AWS"
                ) from error
            raise RemoteStorageError(f"{place}: {error}") from error
        except (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.CredentialRetrievalError,
            exceptions.ProfileNotFound,
            exceptions.NoRegionError,
            exceptions.ParamValidationError,
            exceptions.ConfigParseError,
            ValueError,
        ) as error:
            raise StorageRefusalError(
                f"{place} cannot be used: {error}; check the credentials and settings of AWS"
            ) from error
        except (exceptions.BotoCoreError, exceptions.HTTPClientError, Boto3Error) as error:
            raise RemoteStorageError(f"{place}: {error}") from error


def _status(size_bytes: int, answer: Mapping[str, Any]) -> FileStatus:
    """Return the status of an object. S3 has times in seconds; the part below a second is made of the ETag."""
    tag = int.from_bytes(hashlib.sha256(answer["ETag"].encode()).digest()[:8]) % 10**9
    return FileStatus(size_bytes=int(size_bytes), modified_ns=int(answer["LastModified"].timestamp()) * 10**9 + tag)


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
