"""Batches on disk, for versions that score them later."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator

from understudy.evaluator.errors import ConfigurationError, OverloadedError
from understudy.v1 import evaluation_pb2

MAX_BYTES = 8 * 2**30

_LENGTH = struct.Struct("<q")


class Spool:
    """Messages in a temporary file that nobody else sees, and that is gone with the object. For one thread.

    Args:
        max_bytes: How much it may hold.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = tempfile.TemporaryFile(prefix="understudy-batches-")  # noqa: SIM115 - it lives as long as this
        self._max_bytes = max_bytes
        self._bytes = 0

    def write(self, batch: evaluation_pb2.EvaluateBatch) -> None:
        """Add a batch.

        Raises:
            OverloadedError: It would be too much.
            ConfigurationError: The disk is full or broken.
        """
        content = batch.SerializeToString()
        self._bytes += _LENGTH.size + len(content)
        if self._bytes > self._max_bytes:
            raise OverloadedError(
                f"the batches, kept for versions that are not loaded, exceed {self._max_bytes} bytes; compare versions "
                "that are loaded, or on a dataset of the server, or on fewer rows",
                retry_after_seconds=60.0,
            )
        try:
            self._file.write(_LENGTH.pack(len(content)))
            self._file.write(content)
        except OSError as error:
            raise ConfigurationError(
                f"the batches cannot be kept for versions that are not loaded ({error.strerror}); make room in the "
                "server's folder for temporary files, or choose another one with TMPDIR"
            ) from error

    def read(self) -> Iterator[evaluation_pb2.EvaluateBatch]:
        """Yield the batches from the beginning."""
        self._file.seek(0)
        while length := self._file.read(_LENGTH.size):
            yield evaluation_pb2.EvaluateBatch.FromString(self._file.read(*_LENGTH.unpack(length)))

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
