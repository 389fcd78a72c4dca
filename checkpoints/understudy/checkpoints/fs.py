"""Folders that appear and disappear atomically, and files of a writer that is not trusted."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.layout import TEMPORARY_PREFIX

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)
_NO_FILES = (errno.ENXIO, errno.ELOOP, errno.ENODEV)
"""The errors for opening a socket, a link to itself, and a device that does not exist."""

_COPIED_AT_ONCE = 2**20

_ROOM_KEPT_BYTES = 2**28
_ROOM_KEPT_SHARE = 20
"""What copies leave free on a disk for others, such as the ledger: so many bytes, or one in so many of a small disk."""

_HOLES_CHECKED_BYTES = 2**30
_DATA_SHARE = 16
"""Of a file of at least so many bytes, one in so many must be data: the rest of a sparse file is holes."""

_OPENED_AT_MOST = 3
"""How often a file is opened that is replaced meanwhile."""


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target`` to fill. It is deleted at the end if it still exists.

    To keep it, rename it to ``target`` inside the ``with`` block.
    """
    folder = _temporary_name(target)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def has_nothing(folder: Path) -> bool:
    """Return whether a folder does not exist or is empty, as the mount point of a lost mount is."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True


def remove_folder(folder: Path) -> None:
    """Delete a folder so that no reader sees a part of it: it is renamed first. A missing folder is no error."""
    doomed = _temporary_name(folder)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)


def sweep(parent: Path) -> None:
    """Delete the leftovers of dead processes in a folder. Only its owner may call this, while holding its lock."""
    for leftover in parent.glob(f"{TEMPORARY_PREFIX}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def open_within(path: Path, root: Path) -> BinaryIO:
    """Open a regular file for reading that a writer put somewhere below a folder. Never waits for another process.

    Raises:
        FileNotFoundError: It does not exist.
        DamagedCheckpointError: It is no regular file, or a symbolic link leads out of the folder.
        OSError: It cannot be read.
    """
    for _ in range(_OPENED_AT_MOST):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NO_FILES:
                raise DamagedCheckpointError(f"{path} is no regular file: {error.strerror}") from error
            raise
        try:
            if _is_within(path, os.fstat(descriptor), root):
                return os.fdopen(descriptor, "rb", buffering=0)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise DamagedCheckpointError(f"{path} is replaced again and again")


def read_within(path: Path, root: Path, *, limit: int) -> bytes:
    """Read a small file of a writer; see `open_within`.

    Raises:
        DamagedCheckpointError: As for `open_within`, or it has more than ``limit`` bytes.
    """
    with open_within(path, root) as file:
        content = bytearray()
        while len(content) <= limit and (piece := file.read(limit + 1 - len(content))):
            content += piece
    if len(content) > limit:
        raise DamagedCheckpointError(f"{path} has more than {limit} bytes")
    return bytes(content)


def check_fits(size: int, folder: Path) -> None:
    """Check that a file of this size fits on the disk of a folder; a sparse one may be larger than any disk.

    Raises:
        OSError: It does not, as if the disk were full.
    """
    disk = shutil.disk_usage(folder)
    if size > disk.free - min(_ROOM_KEPT_BYTES, disk.total // _ROOM_KEPT_SHARE):
        too_little = f"{size} bytes would leave too little of the {disk.free} that are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {too_little}", str(folder))


def check_dense(file: BinaryIO, path: Path) -> None:
    """Check that a large file is not nearly all holes: a few bytes would take hours to hash, or fill a disk as a copy.

    Raises:
        DamagedCheckpointError: It is.
        OSError: It cannot be read.
    """
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    data = at = 0
    while size >= _HOLES_CHECKED_BYTES and data * _DATA_SHARE < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise DamagedCheckpointError(f"{path} has {size} bytes, of which nearly all are holes") from error
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        data += at - begin
    os.lseek(descriptor, 0, os.SEEK_SET)


def link_or_copy(source: Path, target: Path, *, root: Path, link: bool = True) -> None:
    """Hard-link a writer's file below ``root`` to ``target``, or copy it. ``target`` outlives ``source``.

    Args:
        source: The writer's file.
        target: Does not exist; its folder is created if missing.
        root: The writer's folder.
        link: Whether a link is good enough: the writer can still overwrite the file in place.

    Raises:
        FileNotFoundError: ``source`` does not exist.
        DamagedCheckpointError: See `open_within` and `check_dense`.
        OSError: Copying failed.
    """
    with open_within(source, root) as file:
        check_dense(file, source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if link and _linked(source, target, os.fstat(file.fileno())):
            return
        check_fits(os.fstat(file.fileno()).st_size, target.parent)
        with target.open("xb") as copy:
            shutil.copyfileobj(file, copy, _COPIED_AT_ONCE)


def _linked(source: Path, target: Path, status: os.stat_result) -> bool:
    """Hard-link the file with this status; return False if that is not possible."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    if os.path.samestat(target.lstat(), status):
        return True
    target.unlink()  # ``source`` is a symbolic link, or was replaced meanwhile.
    return False


def _is_within(path: Path, status: os.stat_result, root: Path) -> bool:
    """Return whether the file that was opened is the one that the path names now; raise if it is not acceptable."""
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(f"{path} is no regular file")
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise DamagedCheckpointError(
            f"{path} is a symbolic link out of {root}, which is not followed; put the file itself there"
        )
    return os.path.samestat(real.lstat(), status)


def _temporary_name(target: Path) -> Path:
    return target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex}")
