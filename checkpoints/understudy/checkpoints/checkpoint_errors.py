"""The exceptions of checkpoints.

CheckpointError
├── DamagedCheckpointError     its files are not what its manifest or its format says
├── UntrustedCheckpointError   it is unsigned, altered, or signed with a key or for a run that is not accepted
├── UnsupportedFormatError     another version wrote it, or its format is not supported
├── UnsupportedLocationError   its location cannot be read
├── CheckpointGoneError        it was deleted or overwritten before it could be fetched
├── AlreadyPublishedError      its step is already committed
├── KeyFileError               a key file cannot be used
└── LockHeldError              another process uses this folder

OSError
├── LocationGoneError          the folder of all checkpoints is gone or empty, which says nothing about them
└── RemoteStorageError         remote storage does not answer, which says nothing about a checkpoint
    └── StorageRefusalError    it refuses: there is no such bucket, or these credentials may not use it
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

MACHINE_ERRNOS: Final = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE),
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    }
)
"""The numbers of an `OSError` that say nothing about a file: a limit, a full or failing disk, or a lost mount."""


class CheckpointError(Exception):
    """Base class of this package's exceptions."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not what its manifest or its format says. The text names the file and the difference."""


class UntrustedCheckpointError(CheckpointError):
    """A signature is required, and the checkpoint has none that is accepted. The text says why."""


class UnsupportedFormatError(CheckpointError):
    """Another version of this package wrote the file, or its format is not supported."""


class UnsupportedLocationError(CheckpointError):
    """The location of the checkpoints cannot be read. The text names the location and the alternative."""


class CheckpointGoneError(CheckpointError):
    """The writer deleted or overwrote a checkpoint before it could be fetched."""


class AlreadyPublishedError(CheckpointError):
    """A checkpoint of this step is already committed; a committed checkpoint never changes."""


class KeyFileError(CheckpointError):
    """A file of a key cannot be used: it is missing, holds something else, or others may read it."""


class LockHeldError(CheckpointError):
    """Another process holds the lock of a folder. The text names its process id if known."""


class LocationGoneError(FileNotFoundError):
    """The folder of all checkpoints is gone or empty, as after the loss of a mount, which says nothing about them.

    Try again later.

    Args:
        folder: The folder that had checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        what = "is empty; waiting for its checkpoints" if folder.exists() else "is gone; waiting for it"
        super().__init__(f"{folder} {what} to return")


class RemoteStorageError(OSError):
    """Remote storage does not answer, or not as expected. It says nothing about a checkpoint: try again later."""


class StorageRefusalError(RemoteStorageError):
    """Remote storage refuses, until an operator mends it. The text names the place and the remedy."""


def gone_error(text: str, *, folder: Path, is_gone: bool) -> CheckpointGoneError | LocationGoneError:
    """Return the error for a checkpoint that is gone: alone, with this text, or with the folder of all of them."""
    return LocationGoneError(folder) if is_gone else CheckpointGoneError(text)
