"""The exceptions of checkpoints.

CheckpointError
├── DamagedCheckpointError     its files are not what its manifest or its format says
├── UnsupportedFormatError     it was written by another version, or in a format that is not read here
├── UnsupportedLocationError   it lies where it cannot be read
├── CheckpointGoneError        it was deleted or overwritten before it could be fetched
├── AlreadyPublishedError      its step is committed already
└── LockHeldError              another process works in this folder
"""

from __future__ import annotations


class CheckpointError(Exception):
    """The root of every exception that this package raises on purpose."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not what its manifest or its format says. The text names the file and the difference."""


class UnsupportedFormatError(CheckpointError):
    """A file was written by another version of this package, or in a format that is not read here."""


class UnsupportedLocationError(CheckpointError):
    """Checkpoints lie where they cannot be read. The text says where, and the alternative."""


class CheckpointGoneError(CheckpointError):
    """A checkpoint was deleted or overwritten by its writer before it could be fetched."""


class AlreadyPublishedError(CheckpointError):
    """A checkpoint of this step is committed already; a committed checkpoint never changes."""


class LockHeldError(CheckpointError):
    """Another process holds the lock of a folder. The text names its process id where it is known."""
