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

VersionState = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END", "UNKNOWN"]
"""The state of a version; UNKNOWN is one that only newer servers have."""

ExampleKind = Literal["hardest", "newly_wrong", "newly_right"]
"""Which examples: those with the greatest losses, or those that only one of two versions decided rightly."""

EvaluationOutcome = Literal[
    "scored",
    "skipped",
    "failed",
    "accepted",
    "refused",
    "undecided",
    "rollout_started",
    "rollout_promoted",
    "rollout_rolled_back",
    "rollout_stopped",
    "unknown",
]
"""The outcome of a checkpoint on a dataset, a decision of the server's gate, or a step of a rollout.

An outcome that only newer servers have is unknown.
"""


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
class Interval:
    """The bounds of a percentile interval of the bootstrap; NaN if no resample has a value."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class SliceScore:
    """The score of the examples of one slice.

    Attributes:
        name: The slice, such as ``label=3``, ``age=[18,30)`` or ``country=FR,label=3``.
        examples: The number of its examples.
        metrics: The loss and every metric that can be computed for it; empty if it has too few examples.
        intervals: The intervals of the metrics; empty without resamples.
        notes: Why it has no metrics, or lacks some.
    """

    name: str
    examples: int
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]
    notes: tuple[str, ...]


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
        notes: Why the numbers may differ from a single device's, or why they were computed on one replica; and which
            metrics have no slices or intervals, and why.
        intervals: The intervals of the metrics; empty without resamples.
        slices: The scores of the slices.
        resamples: How many times the examples were resampled for the intervals; 0 for none.
        confidence: The confidence level of the intervals.
    """

    metrics: Mapping[str, float]
    examples: int
    batches: int
    step: int
    waiting_seconds: float
    computing_seconds: float
    notes: tuple[str, ...]
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    slices: tuple[SliceScore, ...] = ()
    resamples: int = 0
    confidence: float = 0.0


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
class MetricDifference:
    """A metric minus the first version's, with the bounds of the paired bootstrap's percentile interval.

    ``p_value`` is the probability of a difference at least this large by chance, corrected by Holm's method for the
    number of versions, and for slices of versions times slices.
    """

    value: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True, kw_only=True)
class SliceDifference:
    """The differences of the metrics of a slice from the first version's, by the names of the metrics."""

    name: str
    examples: int
    differences: Mapping[str, MetricDifference]


@dataclass(frozen=True, kw_only=True)
class ComparedVersion:
    """One version compared with the first.

    Attributes:
        score: Its score, the same as when it is evaluated alone.
        differences: Each metric minus the first version's.
        loss_difference: The difference of the mean loss per example, with its interval; None for the first version, and
            if examples have no losses of their own.
        metric_differences: The differences with their intervals; empty for the first version.
        slice_differences: The same for each slice; empty for the first version.
    """

    score: EvaluateResult
    differences: Mapping[str, float]
    loss_difference: LossDifference | None
    metric_differences: Mapping[str, MetricDifference] = field(default_factory=dict)
    slice_differences: tuple[SliceDifference, ...] = ()


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
class GateCondition:
    """One condition of a gate, and what it was decided on.

    Attributes:
        text: The condition, as the operator wrote it.
        outcome: Whether it was accepted, refused or undecided.
        value: The checkpoint's value.
        baseline_step: The step it was compared with; None if the condition compares with a number.
        baseline_value: The value of that step on the same examples.
        interval: The interval that decided: of the value, or of its difference from the baseline's; None if there is
            none.
        reason: Why the outcome is what it is.
    """

    text: str
    outcome: EvaluationOutcome
    value: float
    baseline_step: int | None
    baseline_value: float | None
    interval: Interval | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One entry of the server's ledger; ``dataset`` is empty if it is about the checkpoint as a whole.

    ``sequence`` ascends from 1 in the order of writing; ``recorded_at`` is in UTC. ``dataset_digest`` identifies the
    content of the dataset, ``metric_digest`` the configuration of the loss and the metrics, and ``metric_digests`` that
    of each by its name: only values of the same configuration can be compared. They are empty in entries of older
    servers. ``conditions`` are those of a gate's decision. For the other attributes, see `EvaluateResult`.
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
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    slices: tuple[SliceScore, ...] = ()
    resamples: int = 0
    confidence: float = 0.0
    dataset_digest: str = ""
    metric_digest: str = ""
    metric_digests: Mapping[str, str] = field(default_factory=dict)
    conditions: tuple[GateCondition, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvaluationTables:
    """The tables that the server recorded with an evaluation.

    Attributes:
        evaluation: The entry of the ledger.
        content: JSON values: ``examples``, ``outputs`` (the tables by output), ``slices``, ``hardest`` and ``notes``.
    """

    evaluation: Evaluation
    content: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Flips:
    """How many examples of a dataset two versions decide differently.

    Attributes:
        newly_wrong: Those that only the baseline decided rightly.
        newly_right: Those that only the version decided rightly.
        both_right: Those that both decided rightly.
        both_wrong: Those that neither decided rightly.
        p_value: Of McNemar's exact test: how likely so uneven a number of changes is if both were equally good.
    """

    newly_wrong: int
    newly_right: int
    both_right: int
    both_wrong: int
    p_value: float


@dataclass(frozen=True, kw_only=True)
class ExampleList:
    """Examples of a dataset of the server.

    Attributes:
        evaluation: The evaluation that says which examples.
        baseline: The evaluation that it is compared with; None for the hardest examples.
        total: How many such examples there are; the list may hold fewer.
        indices: Their places in the dataset.
        described: What is known about each: of the hardest, its ``loss``, and what is ``actual`` and ``predicted``.
        inputs: Their inputs by name, ``[examples, ...]``; of the first examples only if they take much memory, and
            empty if the dataset has changed since.
        targets: Their targets by the names of outputs; under ``targets`` for a model with one output.
        sample_weights: Their sample weights, if there are any.
        flips: How the two versions differ; None for the hardest examples.
        notes: Why something is missing.
    """

    evaluation: Evaluation
    baseline: Evaluation | None
    total: int
    indices: tuple[int, ...]
    described: tuple[Mapping[str, Any], ...]
    inputs: Mapping[str, Array]
    targets: Mapping[str, Array]
    sample_weights: Mapping[str, Array]
    flips: Flips | None
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
class ServingDecision:
    """Which checkpoint an evaluator serves.

    Attributes:
        step: Its step.
        digest: The SHA-256 that identifies its content.
        sequence: The number of the decision, from 1 on.
    """

    step: int
    digest: str
    sequence: int


@dataclass(frozen=True, kw_only=True)
class FleetServer:
    """A server that follows an evaluator.

    Attributes:
        name: Its name.
        address: The address that it calls from.
        software_version: The version of its software.
        connected: Whether it is connected.
        current: Whether it is connected and serves what was decided last.
        serving_step: The step that it serves, or served when it was last connected; None before the first.
        serving_digest: The digest of that checkpoint; empty before the first.
        serving_seconds: For how long it has served that; None before the first.
        lag_seconds: How long after a decision it served it, or, if it is behind, how long ago that was decided; None if
            it served it when it connected.
        reason: Why it does not serve what was decided last; empty if it does, or is about to.
        canary: Whether it is of the part that serves the version of a rollout.
    """

    name: str
    address: str
    software_version: str
    connected: bool
    current: bool
    serving_step: int | None
    serving_digest: str
    serving_seconds: float | None
    lag_seconds: float | None
    reason: str
    canary: bool = False


@dataclass(frozen=True, kw_only=True)
class ShadowCounts:
    """What came of the requests that a version computed once more, after the serving version had answered them.

    Attributes:
        compared: The requests whose answers were compared.
        disagreeing: The sum of the shares of their examples that differ.
        not_finite: Those of them with numbers that are not finite, and are in the serving version's answer.
        errors: The requests that failed, although the serving version answered them; they are not compared.
        dropped: The requests of the sample that were not computed, as the devices were busy or memory was short.
        largest_difference: The largest difference of two numbers, relative to the largest number of the output.
        seconds: What requests took that both versions computed alone, one after the other.
        serving_seconds: What the same requests took the serving version.
    """

    compared: int
    disagreeing: float
    not_finite: int
    errors: int
    dropped: int
    largest_difference: float
    seconds: float
    serving_seconds: float


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A rollout that is under way.

    Attributes:
        step: The step that is rolled out.
        digest: The digest of its checkpoint.
        servers: The names of the servers that serve it; none if it only computes requests once more.
        elapsed_seconds: For how long one of them has served it, or has had it loaded to compute requests once more.
        after_seconds: After how long all serve it.
        shadow: What came of the requests that it computed once more; None for a canary.
        least_requests: How many of them it takes besides the time.
    """

    step: int
    digest: str
    servers: tuple[str, ...]
    elapsed_seconds: float
    after_seconds: float
    shadow: ShadowCounts | None = None
    least_requests: int = 0


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """What an evaluator decided, and which servers carried that out.

    Attributes:
        decision: The present decision; None if nothing has been served yet.
        servers: The servers that follow, by name; those that left are listed for an hour.
        rollout: The rollout that is under way; None if there is none.
    """

    decision: ServingDecision | None
    servers: tuple[FleetServer, ...]
    rollout: Rollout | None = None


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """The serving, previous and pinned steps after a change; None where there is none."""

    serving_step: int
    previous_step: int | None
    pinned_step: int | None
