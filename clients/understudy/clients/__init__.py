"""Python clients of an Understudy server. They take and return NumPy arrays and do not need TensorFlow.

>>> from understudy.clients import Client
>>> with Client("127.0.0.1:8500") as client:  # doctest: +SKIP
...     result = client.predict(images)
...     print(result.step, result.output.argmax(axis=1))
"""

from __future__ import annotations

from understudy.clients.async_client import AsyncClient
from understudy.clients.call_options import CallOptions
from understudy.clients.client import Client
from understudy.clients.client_errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnderstudyError,
    UnimplementedError,
)
from understudy.clients.evaluation_types import (
    ComparedVersion,
    CompareResult,
    EvaluateResult,
    Evaluation,
    EvaluationTables,
    ExampleList,
    Flips,
    GateCondition,
    Interval,
    LossDifference,
    Metric,
    MetricDifference,
    Progress,
    SliceDifference,
    SliceScore,
)
from understudy.clients.types import (
    Checkpoint,
    FleetServer,
    FleetStatus,
    ModelMetadata,
    ModelStatus,
    OutputTask,
    PredictResult,
    Promotion,
    ReplayedModel,
    Rollout,
    ServingDecision,
    ShadowCounts,
    TensorSpec,
    Version,
    VersionStatus,
)

__all__ = [
    "AbortedError",
    "AsyncClient",
    "CallOptions",
    "CancelledError",
    "Checkpoint",
    "Client",
    "CompareResult",
    "ComparedVersion",
    "DeadlineExceededError",
    "EvaluateResult",
    "Evaluation",
    "EvaluationTables",
    "ExampleList",
    "FailedPreconditionError",
    "FleetServer",
    "FleetStatus",
    "Flips",
    "GateCondition",
    "InternalError",
    "Interval",
    "InvalidArgumentError",
    "LossDifference",
    "MessageTooLargeError",
    "Metric",
    "MetricDifference",
    "ModelMetadata",
    "ModelStatus",
    "NotFoundError",
    "OutputTask",
    "OverloadedError",
    "PermissionDeniedError",
    "PredictResult",
    "Progress",
    "Promotion",
    "ReplayedModel",
    "Rollout",
    "ServingDecision",
    "ShadowCounts",
    "SliceDifference",
    "SliceScore",
    "TensorSpec",
    "UnauthenticatedError",
    "UnavailableError",
    "UnderstudyError",
    "UnimplementedError",
    "Version",
    "VersionStatus",
]
