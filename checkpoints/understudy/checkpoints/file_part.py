"""A part of a file, as a file: for example an uncompressed member of a zip archive."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

_SLICE_BYTES = 2**22
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""The header of each file in a zip archive; it holds, among others, the lengths of the two fields that follow it."""


class FilePart(io.RawIOBase):
    """A part of a file, for reading. Reads release the GIL.

    Args:
        file: The file.
        start: Where the part starts, in bytes.
        size: The size of the part in bytes; None if it extends to the end of the file.
    """

    def __init__(self, file: Path, start: int = 0, size: int | None = None) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)
        self.name = str(file)
        self._start = start
        self._size = os.fstat(self._descriptor).st_size - start if size is None else size
        self._position = 0

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `io.IOBase`."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or less at the end of the part."""
        into = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self.read_at(self._position, into)
        self._position += len(into)
        return len(into)

    def read_at(self, position: int, into: memoryview) -> None:
        """Fill a buffer from a position.

        Raises:
            EOFError: The file ends before the buffer is full.
        """
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptor, [into[done : done + _SLICE_BYTES]], self._start + position + done)
            if count == 0:
                raise EOFError(f"{self.name} ends early")
            done += count

    def close(self) -> None:
        """See `io.IOBase`."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def start_of_member(info: zipfile.ZipInfo, archive_file: Path) -> int:
    """Return the offset of a member's content in an archive, in bytes."""
    with archive_file.open("rb") as archive:
        archive.seek(info.header_offset)
        *_, name_length, extra_length = _LOCAL_HEADER.unpack(archive.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)
