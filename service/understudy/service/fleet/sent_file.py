"""A file that is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import BinaryIO


class SentFile:
    """Opens a file with the first read. Thread-safe: it may be closed during a read, which may take any time.

    Args:
        opening: Opens the file.
        offset: Where to begin to read.
    """

    def __init__(self, opening: Callable[[], BinaryIO], *, offset: int) -> None:
        self._opening = opening
        self._offset = offset
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._closed = False

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most so many; none at the end or once it is closed.

        Raises:
            Exception: It cannot be opened.
            OSError: It cannot be read.
        """
        with self._lock:
            if self._closed:
                return b""
            if self._file is None:
                self._file = self._opening()
                self._file.seek(self._offset)
            return self._file.read(size)

    def close(self) -> None:
        """Close the file, after a read that is under way."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()
