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
from understudy.checkpoints.publish import CheckpointPublisher
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.checkpoints.source import Checkpoint, CheckpointSource, RunSource
from understudy.checkpoints.taken import TakenCheckpoint, open_taken

__all__ = [
    "AlreadyPublishedError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointGoneError",
    "CheckpointPublisher",
    "CheckpointSource",
    "DamagedCheckpointError",
    "DirectoryLock",
    "FileEntry",
    "LockHeldError",
    "Manifest",
    "RunDir",
    "RunSource",
    "Signature",
    "TakenCheckpoint",
    "TensorSpec",
    "UnsupportedFormatError",
    "open_taken",
    "read_manifest",
]
