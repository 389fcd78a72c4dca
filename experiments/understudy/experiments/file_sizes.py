"""Compares what files of examples claim with what they hold, before anything is allocated for it.

A few bytes can claim an array or a record of any size, and a compressed file can hold a thousand times its own size.
"""

from __future__ import annotations

import functools
import gzip
import math
import os
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from understudy.devices.host import available_memory_bytes
from understudy.experiments.experiment_errors import ExampleError

MAX_RECORD_BYTES: Final = 256 * 1024 * 1024
"""The most bytes of a record, which is one example: several copies of it are in memory at a time."""
MAX_ARRAY_BYTES: Final = 1024 * 1024 * 1024
"""Arrays that take more than this in all have to fit into the memory that is available."""

_HEADER: Final = struct.Struct("<QI")
_CHECKSUM_BYTES: Final = 4
_CHUNK_BYTES: Final = 64 * 1024


def count_records(file: Path, *, is_compressed: bool) -> int:
    """Return the number of records of a TFRecord file, from their lengths.

    The result is kept until the file changes. Checksums are not compared.

    Args:
        file: The file.
        is_compressed: Whether it is compressed by gzip.

    Raises:
        OSError: It cannot be read.
        ExampleError: It is no regular file, ends within a record, holds zeros in a record's place, or a record is too
            large. The text does not name the file.
    """
    found = file.stat()
    check_regular(found)
    return _count(file, found.st_ino, found.st_size, found.st_mtime_ns, is_compressed)


@functools.lru_cache(maxsize=65_536)
def _count(file: Path, _inode: int, size: int, _changed_ns: int, is_compressed: bool) -> int:  # noqa: FBT001
    opened: Any = gzip.open(file) if is_compressed else file.open("rb", _CHUNK_BYTES)  # noqa: SIM115 - below
    with opened as stream:
        count = 0
        try:
            while header := stream.read(_HEADER.size):
                if len(header) < _HEADER.size:
                    raise ExampleError(f"it ends within record {count}")
                if not any(header):  # the checksum of a length of 0 is another number
                    raise ExampleError(f"record {count} is nothing but zeros")
                length, _ = _HEADER.unpack(header)
                if length > MAX_RECORD_BYTES:
                    raise ExampleError(f"record {count} has {length} bytes; the limit is {MAX_RECORD_BYTES}")
                if not _skipped(stream, length + _CHECKSUM_BYTES, None if is_compressed else size):
                    raise ExampleError(f"it ends within record {count}, which has {length} bytes")
                count += 1
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ExampleError(f"it is damaged after record {count}: {error}") from error
    return count


def _skipped(stream: IO[bytes], count: int, size: int | None) -> bool:
    """Skip bytes; return whether there were as many. Without the size of the stream they are read."""
    if size is not None:
        return stream.seek(count, os.SEEK_CUR) <= size
    while count > 0:
        found = len(stream.read(min(count, _CHUNK_BYTES)))
        if not found:
            return False
        count -= found
    return True


def check_regular(status: os.stat_result) -> None:
    """Raise ExampleError if this is the status of a pipe, a device or a folder: reading it may wait, or never end."""
    if not stat.S_ISREG(status.st_mode):
        raise ExampleError("it is no regular file")


def check_arrays(stream: IO[bytes]) -> None:
    """Check a ``.npy`` or ``.npz`` file, and return to its beginning.

    Args:
        stream: The file.

    Raises:
        ValueError: An array claims more than there is, all together do not fit into memory, or it is no such file.
        zipfile.BadZipFile: It is damaged.
    """
    size = os.fstat(stream.fileno()).st_size
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            for member in members:
                with archive.open(member) as content:
                    _check_array(member.filename, content, member.file_size)
            size = sum(member.file_size for member in members)
    else:
        stream.seek(0)
        _check_array("it", stream, size)
    stream.seek(0)
    if size > MAX_ARRAY_BYTES and size > (available := _available_bytes()):
        raise ValueError(f"its arrays take {size} bytes of memory, and {available} are available")


def _check_array(name: str, stream: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(stream)
    read_header: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    claimed = math.prod(shape) * dtype.itemsize
    if claimed > size and not dtype.hasobject:
        raise ValueError(f"{name} claims an array of {claimed} bytes, and holds {size}")
    if 0 in shape[1:]:
        raise ValueError(f"{name} has the shape {shape}; examples of no elements take no bytes, however many there are")


def _available_bytes() -> float:
    try:
        return available_memory_bytes()
    except OSError:  # only Linux says it
        return math.inf


def check_filled(message: Any, size: int, key: str) -> None:
    """Raise ValueError if a tensor of a feature has more elements than bytes: one value can stand for any number."""
    elements = math.prod(dim.size for dim in message.tensor_shape.dim)
    if elements > size:
        raise ValueError(f"feature {key!r} has {elements} elements in {size} bytes")
