"""Temporary folders that outlive the death of their process only until the next one is made."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_log = logging.getLogger(__name__)

PREFIX: Final = "understudy-"

LOCK_FILE: Final = ".temporary-folder"
"""The file that the owner locks. Only folders with it are deleted: others of this prefix may be a user's own."""

_MEMORY: Final = "/dev/shm"  # noqa: S108 - only folders of this user are made there

_DELETED_AT_ONCE: Final = 16
"""How many folders in one place a call deletes, so that no start takes long."""

_ATTEMPTS: Final = 5
"""How often a folder is made that another process deletes before it is locked."""


class TemporaryFolder:
    """A new, private folder: only this user can read it. A context manager that deletes it.

    This process holds a lock on a file in it. The kernel releases the lock when the process ends, however it ends; the
    next `TemporaryFolder` or `delete_abandoned` of this user then deletes what is left. Not thread-safe.

    Args:
        in_memory: Whether to make it in memory if this machine has a folder there, for what must not reach a disk.

    Raises:
        OSError: It cannot be made or locked.
    """

    def __init__(self, *, in_memory: bool = False) -> None:
        delete_abandoned()
        is_there = in_memory and os.access(_MEMORY, os.W_OK)
        self.path, descriptor = _new_folder(_MEMORY if is_there else tempfile.gettempdir())
        self._descriptor: int | None = descriptor

    def keep_across_exec(self) -> None:
        """Hold the lock also in the program that replaces this one, until the process ends."""
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, True)

    def delete(self) -> None:
        """Delete it. Idempotent. Raise OSError if that fails; the next process then tries again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            delete_folder(self.path)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.delete()


def delete_folder(path: Path) -> None:
    """Delete the folder of a `TemporaryFolder` of this process; raise OSError if that fails."""
    with _opened(path, os.O_DIRECTORY) as folder:
        _delete(path, folder)


def delete_abandoned() -> None:
    """Delete folders of this user whose owner has ended, but not more than a few. Follows no symbolic link."""
    for place in dict.fromkeys((tempfile.gettempdir(), _MEMORY)):
        deleted = 0
        for path in _candidates(place):
            deleted += _deleted_if_abandoned(path)
            if deleted == _DELETED_AT_ONCE:
                break


def _candidates(place: str) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _new_folder(place: str) -> tuple[Path, int]:
    """Make a folder; return it with the descriptor that holds its lock."""
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if _locked(descriptor, path) and _is_at(descriptor, path / LOCK_FILE):
            return path, descriptor
        os.close(descriptor)
    raise OSError(f"no folder in {place} can be locked: others delete them; give another one by TMPDIR")


def _locked(descriptor: int, path: Path) -> bool:
    """Lock a file; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)
        raise OSError(
            error.errno, f"files cannot be locked here ({error.strerror}); set TMPDIR to a folder on a local disk", path
        ) from error
    return True


def _is_at(descriptor: int, path: Path | str, *, folder: int | None = None) -> bool:
    """Return whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _deleted_if_abandoned(path: Path) -> bool:
    """Delete a folder if no process holds its lock; return whether it was deleted."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(_opened(path, os.O_DIRECTORY))
            lock = stack.enter_context(_opened(LOCK_FILE, os.O_NONBLOCK, folder=folder))
            is_own = os.fstat(folder).st_uid == os.geteuid() and stat.S_ISREG(os.fstat(lock).st_mode)
            if is_own:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it has no such file, is another user's, or in use
            return False
        if not is_own or not _is_at(lock, LOCK_FILE, folder=folder):
            return False
        try:
            _delete(path, folder)
        except OSError as error:
            _log.warning("%s, of a process that was killed, cannot be deleted: %s", path, error)
            return False
    _log.info("%s is deleted: the process that made it was killed", path)
    return True


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, *, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _delete(path: Path, folder: int) -> None:
    """Delete an open folder, the locked file last: if that ends in the middle, the next call goes on."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name != LOCK_FILE]
    for name, is_folder in found:
        if is_folder:
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(LOCK_FILE, dir_fd=folder)
    path.rmdir()
