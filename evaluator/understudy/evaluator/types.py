"""The values that pass between the evaluator and its callers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy.typing as npt

from understudy.checkpoints.evaluation_results import (
    UNKNOWN_CONFIGURATION as UNKNOWN_CONFIGURATION,  # noqa: PLC0414 - re-exported
)
from understudy.checkpoints.evaluation_results import (
    MetricConfiguration as MetricConfiguration,  # noqa: PLC0414 - re-exported
)
from understudy.checkpoints.signature import Signature as Signature  # noqa: PLC0414 - re-exported
from understudy.checkpoints.signature import TensorSpec as TensorSpec  # noqa: PLC0414 - re-exported
from understudy.devices.nvml import GpuReading as GpuReading  # noqa: PLC0414 - re-exported

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_Token_contra = TypeVar("_Token_contra", contravariant=True)


class ArrayForm(NamedTuple):
    """The form of an array that need not exist yet: NumPy's name of its dtype (``string`` for bytes), and its shape."""

    dtype: str
    shape: tuple[int, ...]


VersionLabel = Literal["serving", "latest", "best"]

CheckpointKey = tuple[int, str]
"""The step and digest of a checkpoint, which identify it."""

Version = int | VersionLabel
"""A version of the model: a training step, or a label resolved when the request arrives."""


class VersionState(enum.Enum):
    """The states of a version, with TensorFlow Serving's names and numbers (``get_model_status.proto``)."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """The state of one version; ``error`` is the error of the last failed attempt to load it, or empty."""

    step: int
    state: VersionState
    error: str = ""
    serving: bool = False


class Prediction(NamedTuple):
    """The outputs of one version for one batch, by name, each ``[examples, ...]``, all computed at ``step``."""

    outputs: Arrays
    step: int


Progress = Callable[[int, int | None], None]
"""Called with the examples scored so far and those of the dataset (None if unknown).

Must be quick and must not raise.
"""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Labelled examples.

    Attributes:
        inputs: Every input by name, each ``[examples, ...]``.
        targets: Every target by the name of its output, or ``{"targets": ...}`` for a single output.
        sample_weights: Weights ``[examples]`` by the name of the output, or ``{"sample_weights": ...}`` for all
            outputs; may be empty.
        features: Features that the model does not take, ``[examples]`` by name, for slices; may be empty.
    """

    inputs: Arrays
    targets: Arrays
    sample_weights: Arrays = field(default_factory=dict)
    features: Arrays = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """The length of axis 0 of the first input."""
        return int(next(iter(self.inputs.values())).shape[0])


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A Keras metric by its name and keyword arguments."""

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
        undefined: Why other metrics are undefined on these examples, by name.
    """

    name: str
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    undefined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The score of one version on one stream or dataset.

    Attributes:
        metrics: The loss (as ``loss``) and every metric by name, except those that are undefined.
        examples: The number of examples scored.
        batches: The number of batches scored.
        step: The step of the checkpoint.
        waiting_seconds: The total time that the batches waited for a device.
        computing_seconds: The total time that the batches were computed.
        notes: Why the numbers may differ from a single device's, or why they were computed on one replica; and which
            metrics have no slices or intervals, or are undefined in many resamples, and why.
        intervals: The intervals of the metrics; empty without resamples.
        slices: The scores of the slices, in the order of the settings, then of the values.
        resamples: How many times the examples were resampled for the intervals; 0 for none.
        confidence: The confidence level of the intervals.
        resampled: The values of the metrics in each resample, float32 ``[resamples]``, under ``metric`` or
            ``metric[slice]``; NaN where one is undefined.
        metric_digests: What identifies the configuration of each metric, such as its number of classes or its
            threshold, by its name; of undefined ones, too. Only values of the same configuration can be compared.
        undefined: Why other metrics are undefined on these examples, by name: an AUC of labels of one class, or a mean
            of weights that are all 0. Keras gives a number for them all the same.
    """

    metrics: Mapping[str, float]
    examples: int
    batches: int
    step: int
    waiting_seconds: float
    computing_seconds: float
    notes: tuple[str, ...] = ()
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    slices: tuple[SliceScore, ...] = ()
    resamples: int = 0
    confidence: float = 0.0
    resampled: Arrays = field(default_factory=dict)
    metric_digests: Mapping[str, str] = field(default_factory=dict)
    undefined: Mapping[str, str] = field(default_factory=dict)


class EvaluationOutcome(enum.Enum):
    """The outcome of a checkpoint on a dataset: a score, a reason for having none, or the gate's decision.

    A gate is undecided if the examples are too few to tell. The others are the steps of a rollout.
    """

    SCORED = "scored"
    SKIPPED = "skipped"
    FAILED = "failed"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    ROLLOUT_STARTED = "rollout_started"
    ROLLOUT_PROMOTED = "rollout_promoted"
    ROLLOUT_ROLLED_BACK = "rollout_rolled_back"
    ROLLOUT_STOPPED = "rollout_stopped"


@dataclass(frozen=True, kw_only=True)
class GateCondition:
    """One condition of a gate, and what it was decided on.

    Attributes:
        text: The condition, as the operator wrote it.
        outcome: ACCEPTED, REFUSED or UNDECIDED.
        value: The checkpoint's value; NaN if it has none.
        baseline_step: The step it was compared with; None if the condition compares with a number.
        baseline_value: The value of that step on the same examples.
        interval: The interval that decided: of the value, or of its difference from the baseline's; None if there is
            none.
        reason: Why the outcome is what it is.
    """

    text: str
    outcome: EvaluationOutcome
    value: float
    baseline_step: int | None = None
    baseline_value: float | None = None
    interval: Interval | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class HeldBack:
    """A checkpoint that does not serve, and why, as a sentence without its end. ``step`` is None if it is not here."""

    step: int | None
    reason: str


WHOLE_CHECKPOINT = ""
"""The dataset of an entry about the checkpoint as a whole."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One entry of the ledger. ``dataset`` is empty if the entry is about the checkpoint as a whole.

    ``sequence`` ascends from 1 in the order of writing, and is 0 until then. ``recorded_at`` is in seconds since the
    epoch.
    ``dataset_digest`` identifies the content of the dataset and ``metric_digest`` the configuration of the loss and the
    metrics as a whole; both are empty in entries that an older version wrote or that have none. ``conditions`` are
    those of a gate's decision. For the other attributes, see `EvaluationResult`.
    """

    sequence: int = 0
    step: int
    checkpoint_digest: str
    dataset: str
    outcome: EvaluationOutcome
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples: int = 0
    duration_seconds: float = 0.0
    recorded_at: float = 0.0
    notes: tuple[str, ...] = ()
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    slices: tuple[SliceScore, ...] = ()
    resamples: int = 0
    confidence: float = 0.0
    dataset_digest: str = ""
    metric_digest: str = ""
    metric_digests: Mapping[str, str] = field(default_factory=dict)
    conditions: tuple[GateCondition, ...] = ()
    undefined: Mapping[str, str] = field(default_factory=dict)

    def configuration(self, metric: str) -> MetricConfiguration:
        """Return what is known of the configuration of a metric."""
        return MetricConfiguration(self.metric_digests.get(metric, ""), self.metric_digest)


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that can be loaded; ``created_at`` is in seconds since the epoch."""

    step: int
    created_at: float
    digest: str
    final: bool

    @cached_property
    def key(self) -> CheckpointKey:
        """The step and digest, which identify the checkpoint."""
        return self.step, self.digest


class LifeEvent(enum.StrEnum):
    """What happens to a checkpoint, besides what the ledger records."""

    COMMITTED = "committed"
    SEEN = "seen"
    VERIFIED = "verified"
    LOADED = "loaded"
    WARMED_UP = "warmed up"
    SERVED = "served"
    REPLACED = "replaced"


@dataclass(frozen=True, kw_only=True)
class LifeRecord:
    """Something that happened to a checkpoint; ``at`` is in seconds since the epoch."""

    checkpoint_digest: str
    event: LifeEvent
    at: float


TaskKind = Literal["binary", "multilabel", "categorical", "sparse", "regression", "unknown"]
ScoreKind = Literal["probabilities", "logits", "unknown"]


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """What an output is for.

    Attributes:
        kind: The task. ``sparse`` has the numbers of classes as targets, ``categorical`` one value for each class.
        scores: What the values of a classification are.
        loss: The name of the loss; empty if there is none.
    """

    kind: TaskKind
    scores: ScoreKind = "unknown"
    loss: str = ""

    @property
    def threshold(self) -> float:
        """A label of a ``binary`` or ``multilabel`` output holds if its value is greater."""
        return 0.5 if self.scores == "probabilities" else 0.0


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The inputs and outputs of one loaded version, and where it runs.

    Attributes:
        step: The step of the checkpoint.
        signature: Names, dtypes and shapes of the inputs and outputs.
        replicas: The number of replicas a batch is split over.
        devices: The devices of the replicas, in order.
        datasets: The datasets known to the evaluator, in the order they are scored.
        notes: Why evaluations may differ from a single device's, or why they run on one replica; and whether Predict
            uses constants for the weights, and why not.
        output_tasks: What each output is for, by its name.
    """

    step: int
    signature: Signature
    replicas: int
    devices: tuple[str, ...]
    datasets: tuple[str, ...]
    notes: tuple[str, ...] = ()
    output_tasks: Mapping[str, OutputTask] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServingChange:
    """The serving step after a decision, the one before it, and the pinned step."""

    serving_step: int
    previous_step: int | None
    pinned_step: int | None


Outcome = Prediction | Exception


CallerKey = Callable[[], Hashable]
"""Returns what tells a caller from others. It is called only if the queue is full, in the thread of the call."""


def this_process() -> Hashable:
    """Return the key of all calls from within this process."""
    return "this process"


class ResultSink(Protocol[_Token_contra]):
    """Delivers the outcomes of predictions. Called on the device's thread, so it must be quick.

    A token is opaque to the engine: it identifies the caller to the sink.
    """

    def begin(self, token: _Token_contra) -> bool:
        """Return whether the caller still waits; called once, when the work begins."""

    def is_cancelled(self, token: _Token_contra) -> bool:
        """Return whether the caller cancelled before the work began."""

    def deliver(self, outcomes: Sequence[tuple[_Token_contra, Outcome]]) -> None:
        """Deliver the outcomes of one batch, each to its caller."""


class FutureSink:
    """Resolves `concurrent.futures.Future`s. Thread-safe."""

    def begin(self, token: Future[Prediction]) -> bool:
        """See `ResultSink`."""
        return token.set_running_or_notify_cancel()

    def is_cancelled(self, token: Future[Prediction]) -> bool:
        """See `ResultSink`."""
        return token.cancelled()

    def deliver(self, outcomes: Sequence[tuple[Future[Prediction], Outcome]]) -> None:
        """See `ResultSink`."""
        for token, outcome in outcomes:
            if isinstance(outcome, Exception):
                token.set_exception(outcome)
            else:
                token.set_result(outcome)


END_AFTER = 2
"""The devices have failed permanently after this multiple of the failures that make them ``FAILING``."""


class DeviceState(enum.Enum):
    """The health of the devices."""

    WORKING = "working"
    FAILING = "failing"
    FAILED = "failed"


DeviceListener = Callable[[DeviceState, str], None]
"""Called with the new state and the last error; must be quick and must not raise."""
