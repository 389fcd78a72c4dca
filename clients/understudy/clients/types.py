"""What clients take and give."""

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

Mappings may be nested; their keys are joined by ``/``.
"""

VersionState = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]
EvaluationOutcome = Literal["scored", "skipped", "failed", "accepted", "refused"]
"""What became of a checkpoint on a dataset; the last two say what the server's gate made of its score."""


@dataclass(frozen=True, kw_only=True)
class PredictResult:
    """What the model made of one batch.

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
        waiting_seconds: What the batches spent waiting for a device, summed.
        computing_seconds: What they spent computing, summed.
        notes: What keeps the numbers from being exactly a single device's, or forced them onto one replica.
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
    """By how much a version's mean loss of an example exceeds the first version's; below 0 is better.

    ``low`` and ``high`` bound the paired bootstrap's percentile interval. An example's loss is the compiled one without
    its reduction, weighted by its sample weight; for several outputs it is their weighted total. Regularizers are left
    out.
    """

    mean: float
    low: float
    high: float

    @property
    def conclusion(self) -> Literal["better", "worse", "undecided"]:
        """Whether the interval lies below 0, above 0, or holds it."""
        return "better" if self.high < 0 else "worse" if self.low > 0 else "undecided"


@dataclass(frozen=True, kw_only=True)
class ComparedVersion:
    """One version beside the first.

    Attributes:
        score: Its score, as an evaluation of it alone gives it.
        differences: By how much each metric exceeds the first version's.
        loss_difference: The same of the mean loss of an example, with its interval; None for the first version, and
            where examples have no losses of their own.
    """

    score: EvaluateResult
    differences: Mapping[str, float]
    loss_difference: LossDifference | None


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """Versions on the same batches, in the order in which they were asked for.

    Attributes:
        versions: The first is what the others are held against.
        resamples: How many times the examples were resampled for the intervals.
        confidence: The part of the resampled differences that an interval holds.
        seed: Of the resampling.
        notes: Why there are no intervals, or why versions took turns.
    """

    versions: tuple[ComparedVersion, ...]
    resamples: int
    confidence: float
    seed: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One entry of the server's ledger; ``dataset`` is empty where it speaks of the checkpoint as a whole.

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
    """How far the evaluation of a dataset has come; ``total_examples`` is None if unknown."""

    examples: int
    total_examples: int | None


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What the model takes or gives under one name; None in the shape stands for any length, axis 0 is the batch.

    ``positional`` says that the name stands for the place in the model's order, as Keras made up the tensor's own.
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
    """The state of every version, newest first, and the steps that the labels stand for; None where for none yet."""

    model_name: str
    versions: tuple[VersionStatus, ...]
    serving_step: int | None
    latest_step: int | None
    best_step: int | None
    pinned_step: int | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint the server sees; ``created_at`` is in UTC, ``final`` says that it ends the training."""

    step: int
    created_at: datetime
    digest: str
    final: bool


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """What is serving after a decision, what was before, and what is pinned; None where nothing is or was."""

    serving_step: int
    previous_step: int | None
    pinned_step: int | None
