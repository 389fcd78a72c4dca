"""Batches on disk, for versions that score them later."""

from __future__ import annotations

import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from understudy.evaluator.evaluator_errors import OverloadedError, StorageError
from understudy.v1 import evaluation_pb2

_LENGTH = struct.Struct("<q")


class Spools:
    """Creates spools, which share one quota. Thread-safe.

    Args:
        folder: The folder of their files; the temporary folder if None.
        max_bytes: The most that all spools together may hold.
    """

    def __init__(self, folder: Path | None, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bytes = 0

    def open(self) -> Spool:
        """Return an empty spool. The caller closes it.

        Raises:
            StorageError: The folder does not exist or is not writable.
        """
        return Spool(self, self._folder)

    def take(self, size: int) -> None:
        """Count written bytes; raise OverloadedError if they exceed the quota."""
        with self._lock:
            if self._bytes + size > self._max_bytes:
                raise OverloadedError(
                    f"the batches of all comparisons, kept for versions that are not loaded, exceed {self._max_bytes} "
                    "bytes; compare versions that are loaded, or on a dataset of the server, or on fewer examples",
                    retry_after_seconds=60.0,
                )
            self._bytes += size

    def give_back(self, size: int) -> None:
        """Count deleted bytes."""
        with self._lock:
            self._bytes -= size


class Spool:
    """Batches in an unnamed temporary file, which is deleted on close. For one thread.

    Args:
        quota: Counts the bytes.
        folder: See `Spools`.

    Raises:
        StorageError: The file cannot be created.
    """

    def __init__(self, quota: Spools, folder: Path | None) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="understudy-batches-", dir=folder)  # noqa: SIM115 - until close
        except OSError as error:
            raise _unkept(error) from error
        self._quota = quota
        self._bytes = 0

    def write(self, batch: evaluation_pb2.EvaluateBatch) -> None:
        """Add a batch.

        Raises:
            OverloadedError: The batch exceeds the quota.
            StorageError: The disk is full or fails.
        """
        content = batch.SerializeToString()
        size = _LENGTH.size + len(content)
        self._quota.take(size)
        self._bytes += size
        try:
            self._file.write(_LENGTH.pack(len(content)))
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise _unkept(error) from error

    def read(self) -> Iterator[evaluation_pb2.EvaluateBatch]:
        """Yield the batches from the beginning."""
        self._file.seek(0)
        while length := self._file.read(_LENGTH.size):
            yield evaluation_pb2.EvaluateBatch.FromString(self._file.read(*_LENGTH.unpack(length)))

    def close(self) -> None:
        """Delete the file. Idempotent."""
        self._file.close()
        self._quota.give_back(self._bytes)
        self._bytes = 0


def _unkept(error: OSError) -> StorageError:
    return StorageError(
        f"the batches cannot be kept for versions that are not loaded ({error.strerror}); make room in the server's "
        "folder for them, or choose another one with --spool-dir"
    )
