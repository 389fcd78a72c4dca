"""The contract between whoever trains and whoever evaluates: checkpoints, and how training ended. No TensorFlow."""

from understudy.checkpoints.errors import (
    AlreadyPublishedError,
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    LockHeldError,
    UnsupportedFormatError,
    UnsupportedLocationError,
)
from understudy.checkpoints.folder import FolderSource
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MODEL_FILE, RunDir
from understudy.checkpoints.locks import DirectoryLock
from understudy.checkpoints.manifest import FileEntry, Manifest, read_manifest
from understudy.checkpoints.publish import CheckpointPublisher
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.checkpoints.source import Checkpoint, CheckpointSource, RunSource
from understudy.checkpoints.taken import TakenCheckpoint, open_taken
from understudy.checkpoints.training import TrainingJournal, TrainingStatus, read_training_status

__all__ = [
    "MODEL_FILE",
    "AlreadyPublishedError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointGoneError",
    "CheckpointPublisher",
    "CheckpointSource",
    "DamagedCheckpointError",
    "DirectoryLock",
    "FileEntry",
    "FolderSource",
    "LockHeldError",
    "Manifest",
    "ModelKind",
    "RunDir",
    "RunSource",
    "Signature",
    "TakenCheckpoint",
    "TensorSpec",
    "TrainingJournal",
    "TrainingStatus",
    "UnsupportedFormatError",
    "UnsupportedLocationError",
    "open_taken",
    "read_manifest",
    "read_training_status",
]
