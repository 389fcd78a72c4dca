"""The clients' types of evaluations, comparisons, and the examples behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from understudy.clients.types import Array, HoldsArrays

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
        notes: Why it has no metrics, or lacks some, or in how many resamples some are undefined.
        undefined: Why other metrics are undefined on its examples, by name.
    """

    name: str
    examples: int
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]
    notes: tuple[str, ...]
    undefined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """The score of one version on one stream.

    Attributes:
        metrics: The loss (as ``loss``) and every metric by name, except those that are undefined.
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
        undefined: Why other metrics are undefined on these examples, by name, such as an AUC of labels of one class.
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
    undefined: Mapping[str, str] = field(default_factory=dict)


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
            if examples have no losses of their own, or the loss of either is undefined.
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
        value: The checkpoint's value; NaN if it is undefined, or if there is none, for the reason that is given.
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
    undefined: Mapping[str, str] = field(default_factory=dict)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleList(HoldsArrays):
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
