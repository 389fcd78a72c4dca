"""Training: one loop for every strategy, exact resume, and self-contained checkpoints. See `train`.

Importing this package does not import TensorFlow; `train` and `EvaluationStopping` import it on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from understudy.trainer.trainer_errors import (
    ClusterError,
    ClusterTimeoutError,
    DataError,
    EvaluationTimeoutError,
    ModelError,
    NonFiniteLossError,
    PeerLostError,
    PreemptedError,
    PublishError,
    ResumeError,
    StepError,
    StopRuleError,
    StrategyError,
    TFConfigError,
    TrainerError,
)

if TYPE_CHECKING:
    from understudy.trainer.callbacks import EvaluationStopping
    from understudy.trainer.training import TrainResult, train

__all__ = [
    "ClusterError",
    "ClusterTask",
    "ClusterTimeoutError",
    "DataError",
    "EvaluationStopping",
    "EvaluationTimeoutError",
    "JsonLinesReporter",
    "LineReporter",
    "ModelError",
    "NonFiniteLossError",
    "PeerLostError",
    "PreemptedError",
    "ProgressReporter",
    "ProgressUpdate",
    "PublishError",
    "ResumeError",
    "SilentReporter",
    "StepError",
    "StopRuleError",
    "StrategyError",
    "TFConfigError",
    "TrainResult",
    "TrainSettings",
    "TrainerError",
    "TrainingPlan",
    "train",
]


_LATE = {"EvaluationStopping": "callbacks", "TrainResult": "training", "train": "training"}
"""Names that need TensorFlow, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"understudy.trainer.{_LATE[name]}"), name)
