"""The contract between whoever trains and whoever evaluates: checkpoints, and how training ended. No TensorFlow."""

from understudy.checkpoints.errors import (
    AlreadyPublishedError,
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    LockHeldError,
    UnsupportedFormatError,
)
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.locks import DirectoryLock
from understudy.checkpoints.manifest import FileEntry, Manifest, read_manifest
from understudy.checkpoints.signature import Signature, TensorSpec

__all__ = [
    "AlreadyPublishedError",
    "CheckpointError",
    "CheckpointGoneError",
    "DamagedCheckpointError",
    "DirectoryLock",
    "FileEntry",
    "LockHeldError",
    "Manifest",
    "RunDir",
    "Signature",
    "TensorSpec",
    "UnsupportedFormatError",
    "read_manifest",
]
