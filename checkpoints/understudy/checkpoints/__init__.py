"""The contract between trainer and evaluator: checkpoints, and how training ended. Does not import TensorFlow."""

from understudy.checkpoints.checkpoint_errors import (
    AlreadyPublishedError,
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    KeyFileError,
    LocationGoneError,
    LockHeldError,
    UnsupportedFormatError,
    UnsupportedLocationError,
    UntrustedCheckpointError,
)
from understudy.checkpoints.detached import sign_checkpoint
from understudy.checkpoints.folder_source import FolderSource
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MODEL_FILE, RunDir
from understudy.checkpoints.local_checkpoint import LocalCheckpoint, open_local_checkpoint
from understudy.checkpoints.locks import DirectoryLock
from understudy.checkpoints.manifest import FileEntry, Manifest, read_manifest
from understudy.checkpoints.publish import CheckpointPublisher
from understudy.checkpoints.run_source import RunSource
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.checkpoints.signing import AcceptedKeys, Signer, SigningKey
from understudy.checkpoints.source import Checkpoint, CheckpointSource
from understudy.checkpoints.training import TrainingJournal, TrainingStatus, read_training_status

__all__ = [
    "MODEL_FILE",
    "AcceptedKeys",
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
    "KeyFileError",
    "LocalCheckpoint",
    "LocationGoneError",
    "LockHeldError",
    "Manifest",
    "ModelKind",
    "RunDir",
    "RunSource",
    "Signature",
    "Signer",
    "SigningKey",
    "TensorSpec",
    "TrainingJournal",
    "TrainingStatus",
    "UnsupportedFormatError",
    "UnsupportedLocationError",
    "UntrustedCheckpointError",
    "open_local_checkpoint",
    "read_manifest",
    "read_training_status",
    "sign_checkpoint",
]
