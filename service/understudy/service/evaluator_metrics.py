"""Metrics of the evaluator that count its events, and the statistics of each version."""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from understudy.evaluator.observer import FreezeOutcome, LoadOutcome, Milestone, Operation
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, EvaluationRecord, LifeEvent
from understudy.service.calls.audit import audit_record
from understudy.service.calls.metrics import TalliedHistogram
from understudy.service.calls.trace import TracedBatch, TracedFuture, join_batch

REMEMBERED_STEPS = 64
"""How many versions to keep: those that were used last."""


@dataclass(kw_only=True, slots=True)
class Times:
    """A number of events and their total duration."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, *, count: int = 1) -> None:
        """Add a number of events and their total duration."""
        self.count += count
        self.seconds += seconds


@dataclass(kw_only=True, slots=True)
class StepStatistics:
    """The predictions of one version, over all protocols.

    Attributes:
        examples: The number of examples, without padding.
        succeeded: The successful requests, from arrival to the end of their batch.
        failed: The requests whose computation failed.
        queued: The waiting times of the requests.
        computed: The requests, each with the whole time of its batch.
        batches: The batches by their number of examples.
        last_at: When the last batch ended, in seconds since the epoch; 0 if none.
    """

    examples: int = 0
    succeeded: Times = field(default_factory=Times)
    failed: Times = field(default_factory=Times)
    queued: Times = field(default_factory=Times)
    computed: Times = field(default_factory=Times)
    batches: defaultdict[int, Times] = field(default_factory=lambda: defaultdict(Times))
    last_at: float = 0.0

    def add_batch(self, examples: int, queue_seconds: Sequence[float], compute_seconds: float) -> None:
        """Add one batch and its requests."""
        requests = len(queue_seconds)
        queued, computed = sum(queue_seconds), compute_seconds * requests
        self.examples += examples
        self.succeeded.add(queued + computed, count=requests)
        self.queued.add(queued, count=requests)
        self.computed.add(computed, count=requests)
        self.batches[examples].add(compute_seconds)


class InferenceStatistics:
    """Keeps the statistics of the versions that were used last. Thread-safe.

    Args:
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: OrderedDict[int, StepStatistics] = OrderedDict()

    def of(self, step: int) -> StepStatistics:
        """Return the current statistics of one version."""
        with self._lock:
            return copy.deepcopy(self._steps.get(step, StepStatistics()))

    def batch_computed(
        self, step: int, *, examples: int, queue_seconds: Sequence[float], compute_seconds: float
    ) -> None:
        """A batch of Predict left the device."""
        with self._lock:
            statistics = self._touch(step)
            statistics.add_batch(examples, queue_seconds, compute_seconds)
            statistics.last_at = self._clock()

    def request_failed(self, step: int, *, seconds: float) -> None:
        """The computation of a Predict request failed, so many seconds after its arrival."""
        with self._lock:
            self._touch(step).failed.add(seconds)

    def _touch(self, step: int) -> StepStatistics:
        statistics = self._steps.setdefault(step, StepStatistics())
        self._steps.move_to_end(step)
        if len(self._steps) > REMEMBERED_STEPS:
            self._steps.popitem(last=False)
        return statistics


DURATION_BUCKETS_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
LOAD_BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
MILESTONE_BUCKETS_SECONDS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
EXAMPLE_BUCKETS = tuple(float(2**exponent) for exponent in range(13))

OPERATIONS: tuple[Operation, ...] = ("predict", "evaluate")
LOAD_OUTCOMES: tuple[LoadOutcome, ...] = ("loaded", "failed", "postponed")
DECISIONS = (EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED, EvaluationOutcome.UNDECIDED)
FREEZE_OUTCOMES: tuple[FreezeOutcome, ...] = ("frozen", "left", "cancelled", "failed")
_RECALL_PAGE = 1000
REJECTIONS = ("queue_full", "deadline", "unmeetable", "cancelled", "invalid", "draining")


class CheckpointTracer(Protocol):
    """Traces checkpoints. Thread-safe; must be quick and must not raise."""

    def reached(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """Something happened to a checkpoint just now."""

    def recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger."""


class ServedTraffic(Protocol):
    """Counts what this server answers, for the evaluator that it follows. Thread-safe; quick."""

    def batch_computed(self, step: int, queue_seconds: Sequence[float], compute_seconds: float) -> None:
        """A batch of requests was computed at a step."""

    def request_failed(self, step: int) -> None:
        """The computation of a request failed."""

    def rejected(self, reason: str) -> None:
        """A request was refused or dropped."""


class ServiceObserver:
    """Keeps metrics and statistics, and reports new entries of the ledger. Thread-safe.

    It is an `understudy.evaluator.observer.Observer`.

    Args:
        registry: Where to register the metrics.
        statistics: Keeps the statistics of every version.
        on_record: Called on one of the evaluator's threads after each entry.
        tracer: Traces the checkpoints; None if nothing is traced, and there are no `TracedFuture`s.
        traffic: Counts for the evaluator that is followed over the network; None if there is none.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        statistics: InferenceStatistics,
        on_record: Callable[[], None],
        tracer: CheckpointTracer | None = None,
        traffic: ServedTraffic | None = None,
    ) -> None:
        self._tracer = tracer
        self._traffic = traffic
        self._statistics = statistics
        self._on_record = on_record

        def histogram(name: str, text: str, bounds: Sequence[float]) -> TalliedHistogram:
            return TalliedHistogram(name, text, bounds, registry)

        self._queue_seconds = histogram(
            "understudy_queue_seconds", "Seconds a request waited for its batch to be closed.", DURATION_BUCKETS_SECONDS
        )
        self._fill_seconds = histogram(
            "understudy_batch_fill_seconds",
            "Seconds a batch was held open for more requests.",
            DURATION_BUCKETS_SECONDS,
        )
        self._compute_seconds = histogram(
            "understudy_compute_seconds", "Seconds a batch spent on the devices.", DURATION_BUCKETS_SECONDS
        )
        self._batch_examples = histogram(
            "understudy_batch_examples", "Examples of a batch, without padding.", EXAMPLE_BUCKETS
        )
        self._load_seconds = Histogram(
            "understudy_checkpoint_load_seconds",
            "Seconds an attempt to load a checkpoint took.",
            buckets=LOAD_BUCKETS_SECONDS,
            registry=registry,
        )
        self._queue_examples = 0
        queue_examples = Gauge("understudy_queue_examples", "Examples waiting for a device.", registry=registry)
        queue_examples.set_function(lambda: self._queue_examples)
        examples = Counter("understudy_examples_total", "Examples computed.", ["operation"], registry=registry)
        self._examples = {operation: examples.labels(operation) for operation in OPERATIONS}
        self._rejected = Counter(
            "understudy_rejected_total", "Requests refused or dropped before a device.", ["reason"], registry=registry
        )
        for reason in REJECTIONS:
            self._rejected.labels(reason)
        self._traces = Counter(
            "understudy_traces_total",
            "Functions traced. Does not rise while requests are answered, whatever the sizes of their batches.",
            registry=registry,
        )
        loads = Counter(
            "understudy_checkpoint_loads_total", "Attempts to load a checkpoint.", ["outcome"], registry=registry
        )
        self._loads = {outcome: loads.labels(outcome) for outcome in LOAD_OUTCOMES}
        self._milestones: Mapping[Milestone, Histogram] = {
            "scored": Histogram(
                "understudy_checkpoint_scored_seconds",
                "Seconds from the writing of a checkpoint until it had a result on every dataset.",
                buckets=MILESTONE_BUCKETS_SECONDS,
                registry=registry,
            ),
            "served": Histogram(
                "understudy_checkpoint_served_seconds",
                "Seconds from the writing of a checkpoint until it served.",
                buckets=MILESTONE_BUCKETS_SECONDS,
                registry=registry,
            ),
        }
        self._input_wait = Counter(
            "understudy_evaluation_input_wait_seconds_total",
            "Seconds in which evaluations waited for the examples of their dataset, with nothing to compute.",
            registry=registry,
        )
        self._cluster_nodes = Gauge(
            "understudy_cluster_nodes",
            "Nodes of the cluster that compute evaluations; 0 while it cannot be used, and without --cluster.",
            registry=registry,
        )
        self._cluster_failures = Counter(
            "understudy_cluster_failures_total",
            "Evaluations that were put off because the cluster could not be used. The log says why.",
            registry=registry,
        )
        evaluations = Counter(
            "understudy_evaluations_total",
            "Entries of the ledger since the start: scores, reasons for none, and decisions of the gate.",
            ["outcome"],
            registry=registry,
        )
        self._evaluations = {outcome: evaluations.labels(outcome.value) for outcome in EvaluationOutcome}
        freezes = Counter(
            "understudy_freezes_total",
            "Attempts to make constants of the serving version's weights. The log says why they were left.",
            ["outcome"],
            registry=registry,
        )
        self._freezes = {outcome: freezes.labels(outcome) for outcome in FREEZE_OUTCOMES}
        self._frozen_memory = Gauge(
            "understudy_frozen_memory_bytes",
            "Memory of the constants for the serving version's weights, about; 0 while they are variables.",
            registry=registry,
        )
        self._evaluation_metric = Gauge(
            "understudy_evaluation_metric",
            "The latest value of each metric of each dataset.",
            ["dataset", "metric"],
            registry=registry,
        )
        self._evaluation_step = Gauge(
            "understudy_evaluation_step", "The step that was scored last.", ["dataset"], registry=registry
        )
        decisions = Counter(
            "understudy_gate_decisions_total", "Decisions of the gate on checkpoints.", ["outcome"], registry=registry
        )
        self._decisions = {outcome: decisions.labels(outcome.value) for outcome in DECISIONS}
        self._held_back = ""
        self._lock = threading.Lock()
        self._shown: dict[str, int] = {}

    def batch_computed(
        self,
        operation: Operation,
        *,
        examples: int,
        queue_seconds: Sequence[float],
        fill_seconds: float,
        compute_seconds: float,
        step: int | None = None,
        tokens: Sequence[object] = (),
    ) -> None:
        """A batch left the device."""
        self._queue_seconds.observe_each(queue_seconds)
        self._fill_seconds.observe(fill_seconds)
        self._compute_seconds.observe(compute_seconds)
        self._batch_examples.observe(examples)
        self._examples[operation].inc(examples)
        if step is not None:
            self._statistics.batch_computed(
                step, examples=examples, queue_seconds=queue_seconds, compute_seconds=compute_seconds
            )
            if self._traffic is not None:
                self._traffic.batch_computed(step, queue_seconds, compute_seconds)
            if self._tracer is not None and any(isinstance(token, TracedFuture) for token in tokens):
                ended = time.monotonic()
                batch = TracedBatch(
                    began=ended - compute_seconds,
                    ended=ended,
                    fill_seconds=fill_seconds,
                    examples=examples,
                    requests=len(tokens),
                    step=step,
                )
                join_batch(batch, tokens, queue_seconds)
                self._exemplify(batch)

    def _exemplify(self, batch: TracedBatch) -> None:
        """Name the traces of a batch in the histograms of its durations."""
        for prediction in batch.predictions:
            self._queue_seconds.exemplify(prediction.queue_seconds, prediction.trace.ids)
        self._compute_seconds.exemplify(batch.ended - batch.began, batch.predictions[0].trace.ids)

    def request_failed(self, *, step: int, seconds: float) -> None:
        """The computation of a Predict request failed; ``grpc_server_handled_total`` counts it."""
        self._statistics.request_failed(step, seconds=seconds)
        if self._traffic is not None:
            self._traffic.request_failed(step)

    def queue_changed(self, examples: int) -> None:
        """The queue now holds this many examples."""
        self._queue_examples = examples

    def rejected(self, reason: str) -> None:
        """A request was refused or dropped."""
        self._rejected.labels(reason).inc()
        if self._traffic is not None:
            self._traffic.rejected(reason)

    def function_traced(self) -> None:
        """A function was traced."""
        self._traces.inc()

    def checkpoint_loaded(self, outcome: LoadOutcome, *, seconds: float) -> None:
        """An attempt to load a checkpoint ended."""
        self._loads[outcome].inc()
        self._load_seconds.observe(seconds)

    def evaluation_waited(self, seconds: float) -> None:
        """See `Observer`."""
        self._input_wait.inc(seconds)

    def checkpoint_reached(self, milestone: Milestone, *, seconds: float) -> None:
        """See `Observer`."""
        self._milestones[milestone].observe(seconds)

    def life_changed(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """See `Observer`."""
        if self._tracer is not None:
            self._tracer.reached(info, event)

    def freezing_ended(self, outcome: FreezeOutcome, *, seconds: float) -> None:
        """See `Observer`."""
        del seconds
        self._freezes[outcome].inc()

    def frozen_memory_changed(self, size: int) -> None:
        """See `Observer`."""
        self._frozen_memory.set(size)

    def cluster_changed(self, nodes: int) -> None:
        """The cluster now has this many nodes that compute evaluations."""
        self._cluster_nodes.set(nodes)

    def cluster_failed(self) -> None:
        """An evaluation was put off."""
        self._cluster_nodes.set(0)
        self._cluster_failures.inc()

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger."""
        self._evaluations[record.outcome].inc()
        self._show(record)
        audit_record(record)
        if self._tracer is not None:
            self._tracer.recorded(record)
        if record.outcome in self._decisions:
            self._decisions[record.outcome].inc()
        self._on_record()

    @property
    def held_back(self) -> str:
        """Why the gate did not accept the checkpoint that it decided on last; empty if it did."""
        return self._held_back

    def recall(self, ledger: Ledger, also: Callable[[EvaluationRecord], None] = lambda _: None) -> None:
        """Show the results of an earlier process until newer ones are recorded. Blocks.

        Args:
            ledger: The ledger.
            also: Called with each entry in their order, so that the ledger is read once.
        """
        after = 0
        while entries := ledger.page(after_sequence=after, limit=_RECALL_PAGE):
            for entry in entries:
                self._show(entry)
                also(entry)
            after = entries[-1].sequence

    def _show(self, record: EvaluationRecord) -> None:
        """Show the metrics of an entry, unless a newer one of its dataset is shown; keep the gate's decision."""
        if record.outcome in self._decisions:
            self._held_back = _held_back(record)
        if record.outcome is not EvaluationOutcome.SCORED:
            return
        with self._lock:
            if record.sequence <= self._shown.get(record.dataset, 0):
                return
            self._shown[record.dataset] = record.sequence
            self._evaluation_step.labels(record.dataset).set(record.step)
            for metric, value in record.metrics.items():
                self._evaluation_metric.labels(record.dataset, metric).set(value)


def _held_back(record: EvaluationRecord) -> str:
    said = {EvaluationOutcome.REFUSED: "the gate refused", EvaluationOutcome.UNDECIDED: "the gate is undecided on"}
    if record.outcome not in said:
        return ""
    return f"no checkpoint is serving yet; {said[record.outcome]} step {record.step}: {record.reason}"
