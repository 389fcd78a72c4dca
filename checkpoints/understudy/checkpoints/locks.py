"""Locks that admit one process at a time to a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Self

from understudy.checkpoints.checkpoint_errors import LockHeldError

LOCK_FILE = "lock"


class DirectoryLock:
    """An exclusive lock on a folder, held on its file ``lock``. The kernel releases it when the process dies.

    Use it as a context manager, or call `acquire` and `release`. It works across processes and between several
    objects in one process, on local disks and on NFS version 4. One object is for one thread at a time.

    Args:
        path: The folder; created if missing.
        alternative: For the error message: what to do instead of stopping the process that holds the lock.
    """

    def __init__(self, path: Path, *, alternative: str = "choose another folder") -> None:
        self._file = path / LOCK_FILE
        self._alternative = alternative
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquire the lock without waiting.

        Raises:
            LockHeldError: The lock is held, possibly by this object.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise LockHeldError(
                f"{self._file.parent} is in use by {holder}; stop that process or {self._alternative}",
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        # The process id is informative; the lock works without it, for example on a full disk.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        """Release the lock if it is held. The file stays, because deleting it would cause a race."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _read_holder(descriptor: int) -> str:
    """Describe the holder of the lock, which may not have written its process id and host yet."""
    process, _, host = os.pread(descriptor, 300, 0).decode(errors="replace").strip().partition(" ")
    if not process.isdecimal():
        return "another process"
    return f"process {process} on {host}" if host else f"process {process}"
