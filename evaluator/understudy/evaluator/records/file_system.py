"""The type of the file system that holds a path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import psutil

_NETWORK = frozenset(
    {
        "9p",
        "afpfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "pvfs2",
        "smb3",
        "smbfs",
        "webdav",
    }
)
_FUSE = "fuse."
"""The prefix of file systems that a program implements, such as ``fuse.sshfs`` and ``fuse.gcsfuse``."""


class Mount(Protocol):
    """A mounted file system."""

    @property
    def mountpoint(self) -> str:
        """The absolute path of its root."""

    @property
    def fstype(self) -> str:
        """Its type, as ``/proc/mounts`` names it."""


def mounted_type(path: Path) -> str:
    """Return the type of the file system that holds an existing path, such as ``ext4``; empty if it is unknown.

    The list of mounts is read; the file system itself is not asked, because a lost server would block the call.
    """
    return type_among(path.resolve(), psutil.disk_partitions(all=True))


def type_among(path: Path, mounts: Iterable[Mount]) -> str:
    """Return the type of the innermost of these mounts that holds an absolute path; of equal ones, the last."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    innermost = max(reversed(holding), key=lambda mount: len(mount.mountpoint), default=None)
    return "" if innermost is None else innermost.fstype


def is_remote(file_system: str) -> bool:
    """Return whether a type of file system is on a network, or may be: a program implements it."""
    return file_system in _NETWORK or file_system.startswith(_FUSE)
