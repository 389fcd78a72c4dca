"""Training: one loop under every strategy, exact resume, and a checkpoint that anyone can load. See `train`.

Importing this package does not import TensorFlow; asking it for `train` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.trainer.errors import (
    ClusterError,
    DataError,
    ModelError,
    NonFiniteLossError,
    PeerLostError,
    ResumeError,
    StrategyError,
    TFConfigError,
    TrainerError,
)
from understudy.trainer.progress import (
    JsonLinesReporter,
    LineReporter,
    ProgressReporter,
    ProgressUpdate,
    SilentReporter,
    TrainingPlan,
)
from understudy.trainer.settings import TrainSettings
from understudy.trainer.tf_config import ClusterTask

if TYPE_CHECKING:
    from understudy.trainer.training import TrainResult, train

__all__ = [
    "ClusterError",
    "ClusterTask",
    "DataError",
    "JsonLinesReporter",
    "LineReporter",
    "ModelError",
    "NonFiniteLossError",
    "PeerLostError",
    "ProgressReporter",
    "ProgressUpdate",
    "ResumeError",
    "SilentReporter",
    "StrategyError",
    "TFConfigError",
    "TrainResult",
    "TrainSettings",
    "TrainerError",
    "TrainingPlan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in ("TrainResult", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from understudy.trainer import training

    return getattr(training, name)
