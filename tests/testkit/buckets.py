"""Servers of S3 and of Google Cloud Storage on this machine, in this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from testkit.ports import free_ports

END_SECONDS = 30.0

Answer = Callable[..., Any]


class StoreServer(ABC):
    """A server of buckets. What it holds outlives `stop`, and it keeps its port.

    Attributes:
        requests: The method and path of each request.
        refuse: Called with the environment of each request; if it returns a status line, the request is answered so.
    """

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        self.requests: list[tuple[str, str]] = []
        self.refuse: Callable[[Mapping[str, Any]], str | None] = lambda _: None
        self._server: HTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer, with what was there before."""
        self._server = self._listening()
        self._thread = threading.Thread(target=self._server.serve_forever, name="bucket-server", args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """End, so that connections are refused. Idempotent."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(END_SECONDS)
            self._server.server_close()
            self._server = None

    def upload(self, path: Path, url: str) -> None:
        """Copy a file, or the files of a folder."""
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                below = file.relative_to(path).as_posix()
                self.put(url if file == path else f"{url}/{below}", file.read_bytes())

    @property
    @abstractmethod
    def environ(self) -> dict[str, str]:
        """The environment of a program that uses it."""

    @abstractmethod
    def make_bucket(self) -> str:
        """Make an empty bucket; return its URL."""

    @abstractmethod
    def names(self, url: str) -> list[str]:
        """Return the names below a URL, relative to it."""

    @abstractmethod
    def put(self, url: str, content: bytes) -> None:
        """Write an object."""

    @abstractmethod
    def read(self, url: str) -> bytes:
        """Return the content of an object."""

    @abstractmethod
    def remove(self, url: str) -> None:
        """Delete an object."""

    @abstractmethod
    def _listening(self) -> HTTPServer:
        """Return a server on the port."""


class BucketServer(StoreServer):
    """Moto's server of S3."""

    def __init__(self) -> None:
        super().__init__()
        self._app: Answer = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a program that uses it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def make_bucket(self) -> str:
        """Make an empty bucket; return its URL."""
        name = f"bucket-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    @functools.cached_property
    def client(self) -> Any:
        """A client of boto3, for the thread of the test."""
        import boto3

        return boto3.client("s3")

    def names(self, url: str) -> list[str]:
        """Return the keys below a URL, relative to it."""
        bucket, _, path = url.removeprefix("s3://").partition("/")
        prefix = f"{path}/" if path else ""
        found = self.client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
        return sorted(entry["Key"].removeprefix(prefix) for entry in found)

    def put(self, url: str, content: bytes) -> None:
        """Write an object."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def read(self, url: str) -> bytes:
        """Return the content of an object."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def remove(self, url: str) -> None:
        """Delete an object."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        self.client.delete_object(Bucket=bucket, Key=key)

    def _listening(self) -> HTTPServer:
        return make_server("127.0.0.1", self._port, self._answer, threaded=True)

    def _answer(self, environ: dict[str, Any], start_response: Answer) -> Any:
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        refused = self.refuse(environ)
        if refused is None:
            return self._app(environ, start_response)
        with contextlib.suppress(OSError):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code = refused.partition(" ")[2].replace(" ", "")
        start_response(refused, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>refused by the test</Message></Error>".encode()]


@contextmanager
def bucket_server() -> Iterator[BucketServer]:
    """Run a server of S3, and have this process use it."""
    server = BucketServer()
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environ.items():
                patch.setenv(name, value)
            patch.delenv("AWS_PROFILE", raising=False)
            yield server
    finally:
        server.stop()


class _RefusedError(Exception):
    """A request is answered with this status."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.code = int(status.partition(" ")[0])


class _Objects(Storage):  # type: ignore[misc]  # it has no types
    """What the emulator stores, with the one precondition that it does not know: that an object is new.

    It is for one thread.
    """

    def __init__(self, on_write: Callable[[str], None]) -> None:
        super().__init__(use_memory_fs=True)
        self.must_be_new = False
        self._on_write = on_write

    def create_file(self, bucket_name: str, file_name: str, *others: Any) -> None:
        """See the emulator's."""
        self._on_write(f"/{bucket_name}/{file_name}")
        if self.must_be_new:
            with contextlib.suppress(NotFound):
                self.get_file_obj(bucket_name, file_name)
                raise _RefusedError("412 Precondition Failed")
        super().create_file(bucket_name, file_name, *others)


class GcsServer(StoreServer):
    """An emulator of Google Cloud Storage. It notes, and may refuse, only writes of objects, as ``PUT``.

    Attributes:
        knows_preconditions: Whether an object is written only where there is none, if the request says so.
        digest: What is said to be the digest of each object; None: what is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.knows_preconditions = True
        self.digest: str | None = None
        self._objects = _Objects(self._note)
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a program that uses it."""
        return {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self._port}", "NO_PROXY": "127.0.0.1"}

    def make_bucket(self) -> str:
        """Make an empty bucket; return its URL."""
        name = f"bucket-{uuid.uuid4().hex}"
        create_bucket(name, self._objects)
        return f"gs://{name}"

    @functools.cached_property
    def client(self) -> Any:
        """A client of Google's library, for the thread of the test."""
        from google.cloud import storage

        return storage.Client()

    def names(self, url: str) -> list[str]:
        """Return the names below a URL, relative to it."""
        bucket, _, path = url.removeprefix("gs://").partition("/")
        prefix = f"{path}/" if path else ""
        return sorted(blob.name.removeprefix(prefix) for blob in self.client.list_blobs(bucket, prefix=prefix))

    def put(self, url: str, content: bytes) -> None:
        """Write an object."""
        self._blob(url).upload_from_string(content)

    def read(self, url: str) -> bytes:
        """Return the content of an object."""
        return bytes(self._blob(url).download_as_bytes())

    def remove(self, url: str) -> None:
        """Delete an object."""
        self._blob(url).delete()

    def _listening(self) -> HTTPServer:
        owner = self

        class Handler(RequestHandler):  # type: ignore[misc]  # it has no types
            def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
                self.storage.must_be_new = owner.knows_preconditions and "ifGenerationMatch=0" in self.path
                try:
                    super().do_POST()
                except _RefusedError as refused:
                    self.send_error(refused.code)

            def send_header(self, keyword: str, value: str) -> None:
                said = owner.digest if keyword.lower() == "x-goog-hash" else None
                super().send_header(keyword, value if said is None else said)

        return HTTPServer(("127.0.0.1", self._port), functools.partial(Handler, self._objects))

    def _blob(self, url: str) -> Any:
        bucket, _, name = url.removeprefix("gs://").partition("/")
        return self.client.bucket(bucket).blob(name)

    def _note(self, path: str) -> None:
        self.requests.append(("PUT", path))
        refused = self.refuse({"REQUEST_METHOD": "PUT", "PATH_INFO": path})
        if refused is not None:
            raise _RefusedError(refused)


@contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Run an emulator of Google Cloud Storage, and have this process use it."""
    server = GcsServer()
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environ.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.stop()
