"""The clients' argument and result types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import numpy.typing as npt

Array = npt.NDArray[Any]

Version = int | Literal["serving", "latest", "best"]
"""A version of the model: a training step, or a label that the server resolves when the request arrives."""

Tensors = npt.ArrayLike | Sequence[Any] | Mapping[str, Any]
"""One array, several in the model's order, or arrays by name. Axis 0 is the batch.

Mappings may be nested; their keys are joined with ``/``.
"""

VersionState = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]
EvaluationOutcome = Literal["scored", "skipped", "failed", "accepted", "refused"]
"""The outcome of a checkpoint on a dataset; the last two are decisions of the server's gate."""


@dataclass(frozen=True, kw_only=True)
class PredictResult:
    """The prediction for one batch.

    Attributes:
        outputs: Every output by name, each ``[examples, ...]`` and read-only; strings are ``bytes`` in object arrays.
        step: The step of the checkpoint that computed all examples.
    """

    outputs: Mapping[str, Array]
    step: int

    @property
    def output(self) -> Array:
        """The only output; raise ValueError if there are several."""
        if len(self.outputs) != 1:
            raise ValueError(f"the model has {len(self.outputs)} outputs; take one of {', '.join(self.outputs)}")
        return next(iter(self.outputs.values()))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A Keras metric by its name and keyword arguments, such as ``Metric(name="AUC", config={"curve": "PR"})``."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """The score of one version on one stream.

    Attributes:
        metrics: The loss (as ``loss``) and every metric by name.
        examples: The examples scored.
        batches: The batches scored.
        step: The step of the checkpoint.
        waiting_seconds: The total time that batches waited for a device.
        computing_seconds: The total time that batches spent computing.
        notes: Why the numbers may differ from a single device's, or why they were computed on one replica.
    """

    metrics: Mapping[str, float]
    examples: int
    batches: int
    step: int
    waiting_seconds: float
    computing_seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """A version's mean loss per example minus the first version's; below 0 is better.

    ``low`` and ``high`` bound the percentile interval of the paired bootstrap. An example's loss is the compiled one
    without its reduction, weighted by its sample weight; for several outputs it is their weighted total.
    Regularization terms are excluded.
    """

    mean: float
    low: float
    high: float

    @property
    def conclusion(self) -> Literal["better", "worse", "undecided"]:
        """Whether the interval is below 0, above 0, or contains 0."""
        return "better" if self.high < 0 else "worse" if self.low > 0 else "undecided"


@dataclass(frozen=True, kw_only=True)
class ComparedVersion:
    """One version compared with the first.

    Attributes:
        score: Its score, the same as when it is evaluated alone.
        differences: Each metric minus the first version's.
        loss_difference: The difference of the mean loss per example, with its interval; None for the first version, and
            if examples have no losses of their own.
    """

    score: EvaluateResult
    differences: Mapping[str, float]
    loss_difference: LossDifference | None


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """The scores of versions on the same batches, in the order of the request.

    Attributes:
        versions: The others are compared with the first.
        resamples: How many times the examples were resampled for the intervals.
        confidence: The confidence level of the intervals.
        seed: The seed of the resampling.
        notes: Why there are no intervals, or why versions were scored one after another.
    """

    versions: tuple[ComparedVersion, ...]
    resamples: int
    confidence: float
    seed: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One entry of the server's ledger; ``dataset`` is empty if it is about the checkpoint as a whole.

    ``sequence`` ascends from 1 in the order of writing; ``recorded_at`` is in UTC.
    """

    sequence: int
    step: int
    checkpoint_digest: str
    dataset: str
    outcome: EvaluationOutcome
    reason: str
    metrics: Mapping[str, float]
    examples: int
    duration_seconds: float
    recorded_at: datetime
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of the evaluation of a dataset; ``total_examples`` is None if unknown."""

    examples: int
    total_examples: int | None


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named input or output of the model; None in the shape means any length, axis 0 is the batch.

    ``positional`` says that the name denotes the position in the model's order: Keras generated the tensor's name.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    positional: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """One version: its inputs and outputs in the model's order, the devices it runs on, and the server's datasets."""

    model_name: str
    step: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    replicas: int
    devices: tuple[str, ...]
    datasets: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """The state of one version; ``error`` says why the last attempt to load it failed, or is empty."""

    step: int
    state: VersionState
    error: str
    serving: bool


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """The state of every version, newest first, and the step of each label; None for a label without a step yet."""

    model_name: str
    versions: tuple[VersionStatus, ...]
    serving_step: int | None
    latest_step: int | None
    best_step: int | None
    pinned_step: int | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that the server sees; ``created_at`` is in UTC, ``final`` marks the last one of a training."""

    step: int
    created_at: datetime
    digest: str
    final: bool


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """The serving, previous and pinned steps after a change; None where there is none."""

    serving_step: int
    previous_step: int | None
    pinned_step: int | None
