"""Copies a file that another process may be writing."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from understudy.checkpoints.fs import check_dense, check_fits, open_within


class FileChangedError(Exception):
    """A file changed while it was being copied. Try again later."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The fields of a file's status that change when it is written or replaced."""

    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Read it from a file's status."""
        return cls(inode=status.st_ino, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def stable_copy(source: Path, target: Path, *, root: Path) -> Stamp:
    """Copy a file, unless it changes meanwhile. It is read once from front to back, without a lock.

    A write within the same tick of the file system's clock can be missed: also check the copy's own checksums.

    Args:
        source: The writer's file.
        target: A path that does not exist yet. After an error, a partial copy may remain.
        root: The writer's folder.

    Returns:
        The file's status, the same before and after.

    Raises:
        FileChangedError: It changed.
        FileNotFoundError: It does not exist.
        DamagedCheckpointError: It is no regular file, nearly all holes, or a symbolic link leads out of ``root``.
        OSError: Reading or writing failed.
    """
    with open_within(source, root) as reader, target.open("xb") as writer:
        check_dense(reader, source)
        before = Stamp.of(os.fstat(reader.fileno()))
        check_fits(before.size_bytes, target.parent)
        shutil.copyfileobj(reader, writer, 1 << 20)
        after = Stamp.of(os.fstat(reader.fileno()))
        if before != after or writer.tell() != before.size_bytes:
            raise FileChangedError(f"{source} changed while it was being copied")
    return before
