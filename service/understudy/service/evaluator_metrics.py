"""Metrics of the evaluator: of its events, as its observer, and those read at each scrape, as of the training."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluation.training_end import TrainingWatch
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.observer import FreezeOutcome, LoadOutcome, Milestone
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, EvaluationRecord, GpuReading, LifeEvent
from understudy.service.calls.audit import audit_record
from understudy.service.calls.metrics import InferenceStatistics, RequestObserver, ServedTraffic

_DIGEST_LENGTH = 8


class LatestScores:
    """Shows the newest score of each dataset. Thread-safe.

    Labels say what a value is computed on and with: the beginnings of the digests that the ledger has of the dataset's
    content and of the metric's configuration. So values that cannot be compared are never one series. A metric has one
    series at a time; that of an earlier content or configuration ends.

    Args:
        registry: Where the gauges are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metric = Gauge(
            "understudy_evaluation_metric",
            "The latest value of each metric of each dataset. The digests, shortened, are of the dataset's content and "
            "of the metric's configuration.",
            ["dataset", "metric", "dataset_digest", "metric_digest"],
            registry=registry,
        )
        self._step = Gauge(
            "understudy_evaluation_step", "The step that was scored last.", ["dataset"], registry=registry
        )
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}
        self._series: dict[str, set[tuple[str, ...]]] = {}

    def show(self, record: EvaluationRecord) -> None:
        """Show an entry, unless it is no score or a newer score of its dataset is shown."""
        if record.outcome is not EvaluationOutcome.SCORED:
            return
        with self._lock:
            if record.sequence <= self._newest.get(record.dataset, 0):
                return
            self._newest[record.dataset] = record.sequence
            self._step.labels(record.dataset).set(record.step)
            values = {_labels(record, metric): value for metric, value in record.metrics.items()}
            for series in self._series.get(record.dataset, set()) - values.keys():
                self._metric.remove(*series)
            self._series[record.dataset] = set(values)
            for series, value in values.items():
                self._metric.labels(*series).set(value)


def _labels(record: EvaluationRecord, metric: str) -> tuple[str, ...]:
    configuration = record.configuration(metric)
    digests = record.dataset_digest, configuration.own or configuration.of_all
    return record.dataset, metric, *(digest[:_DIGEST_LENGTH] for digest in digests)


LOAD_BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
MILESTONE_BUCKETS_SECONDS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
LOAD_OUTCOMES: tuple[LoadOutcome, ...] = ("loaded", "failed", "postponed")
DECISIONS = (EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED, EvaluationOutcome.UNDECIDED)
FREEZE_OUTCOMES: tuple[FreezeOutcome, ...] = ("frozen", "left", "cancelled", "failed")
_RECALL_PAGE = 1000


class CheckpointTracer(Protocol):
    """Traces checkpoints. Thread-safe; must be quick and must not raise."""

    def reached(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """Something happened to a checkpoint just now."""

    def recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger."""


class ServiceObserver(RequestObserver):
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
        super().__init__(registry, statistics=statistics, is_tracing=tracer is not None, traffic=traffic)
        self._tracer = tracer
        self._on_record = on_record

        self._load_seconds = Histogram(
            "understudy_checkpoint_load_seconds",
            "Seconds an attempt to load a checkpoint took.",
            buckets=LOAD_BUCKETS_SECONDS,
            registry=registry,
        )
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
        self._scores = LatestScores(registry)
        decisions = Counter(
            "understudy_gate_decisions_total", "Decisions of the gate on checkpoints.", ["outcome"], registry=registry
        )
        self._decisions = {outcome: decisions.labels(outcome.value) for outcome in DECISIONS}

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
        self._scores.show(record)
        audit_record(record)
        if self._tracer is not None:
            self._tracer.recorded(record)
        if record.outcome in self._decisions:
            self._decisions[record.outcome].inc()
        self._on_record()

    def recall(self, ledger: Ledger, also: Callable[[EvaluationRecord], None] = lambda _: None) -> None:
        """Show the results of an earlier process until newer ones are recorded. Blocks.

        Args:
            ledger: The ledger.
            also: Called with each entry in their order, so that the ledger is read once.
        """
        after = 0
        while entries := ledger.page(after_sequence=after, limit=_RECALL_PAGE):
            for entry in entries:
                self._scores.show(entry)
                also(entry)
            after = entries[-1].sequence


STATES = ("running", "finished", "failed")


class EvaluatorCollector(Collector):
    """Shows steps, ages, replicas and memory at the time of the scrape. Thread-safe.

    A step or age that does not exist yet is NaN, so that the series exists from the start.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield every metric; those of GPUs only if NVML reports them."""
        evaluator = self._evaluator
        yield _gauge("understudy_replicas", "Replicas that a batch is split over.", evaluator.replicas)
        yield _gauge("understudy_serving_step", "The serving step.", evaluator.serving_step)
        yield _gauge("understudy_latest_step", "The newest step that has been loaded.", evaluator.latest_step)
        yield _gauge("understudy_best_step", "The best step by the monitored metric.", evaluator.best_step)
        yield _gauge(
            "understudy_checkpoint_age_seconds",
            "Seconds since the serving checkpoint was written.",
            evaluator.checkpoint_age_seconds(),
        )
        yield _gauge(
            "understudy_checkpoints_waiting",
            "Checkpoints that wait to be scored, with the one being scored.",
            evaluator.checkpoints_waiting(),
        )
        yield _gauge(
            "understudy_source_failures",
            "How often in a row the source, a checkpoint in it or the state folder could not be used; see the log.",
            evaluator.source_failures,
        )
        rollout = evaluator.rollout
        yield _gauge(
            "understudy_rollout_step",
            "The step of a rollout, which a part of the servers that follow serves, or computes requests once more.",
            None if rollout is None else rollout.step,
        )
        yield _gauge(
            "understudy_rollout_seconds",
            "Seconds in which they have served the step of a rollout, or had it loaded.",
            None if rollout is None else rollout.elapsed_seconds,
        )
        shadow = None if rollout is None else rollout.shadow
        yield _gauge(
            "understudy_rollout_compared_requests",
            "Requests that the step of a rollout has computed once more, for comparison.",
            None if shadow is None else shadow.compared,
        )
        yield _gauge(
            "understudy_rollout_disagreement",
            "Mean share of the examples of these requests whose answers differ.",
            None if shadow is None or not shadow.compared else shadow.disagreement,
        )
        memory = GaugeMetricFamily(
            "understudy_device_memory_bytes", "Memory in use on each device.", labels=["device", "kind"]
        )
        for (device, kind), used in evaluator.device_memory().items():
            memory.add_metric([device, kind], used)
        yield memory
        yield from _of_gpus(evaluator.gpu_readings())


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=math.nan if value is None else value)


def _of_gpus(readings: Mapping[str, GpuReading]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Yield the GPUs' readings from NVML. A GPU without a reading has no series for it."""
    if not readings:
        return
    memory = GaugeMetricFamily(
        "understudy_device_nvml_memory_bytes",
        "Memory of each GPU: used by all processes, and total (NVML).",
        labels=["device", "kind"],
    )
    utilization = GaugeMetricFamily(
        "understudy_device_utilization_ratio",
        "Share of the time in which a GPU ran anything (NVML).",
        labels=["device"],
    )
    errors = CounterMetricFamily(
        "understudy_device_ecc_errors",
        "Errors of a GPU's memory since the driver was loaded (NVML).",
        labels=["device", "kind"],
    )
    for device, reading in readings.items():
        _add(memory, [device, "used"], reading.memory_used_bytes)
        _add(memory, [device, "total"], reading.memory_total_bytes)
        _add(utilization, [device], reading.utilization)
        _add(errors, [device, "corrected"], reading.corrected_errors)
        _add(errors, [device, "uncorrected"], reading.uncorrected_errors)
    yield memory
    yield utilization
    yield errors


def _add(family: GaugeMetricFamily | CounterMetricFamily, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)


class RunCollector(Collector):
    """Shows how far the training is, by its journal. Thread-safe; each scrape reads one small file.

    What is not known is NaN, so that the series exists from the start.

    Args:
        training: Reads the journal.
    """

    def __init__(self, training: TrainingWatch) -> None:
        self._training = training

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every metric."""
        status = self._training.read()
        progress = None if status is None else status.progress
        state = GaugeMetricFamily("understudy_run_state", "1 for the state of the training.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(status is not None and status.state == name))
        yield state
        yield _gauge("understudy_run_step", "Training steps taken.", None if status is None else status.step)
        yield _gauge("understudy_run_steps", "Training steps when done.", None if progress is None else progress.steps)
        yield _gauge(
            "understudy_run_examples_per_second",
            "Examples that the training takes in a second.",
            None if progress is None else progress.examples_per_second,
        )
        yield _gauge(
            "understudy_run_input_wait_ratio",
            "Share of the time in which the training waits for its input.",
            None if progress is None else progress.input_wait_share,
        )
        yield _gauge(
            "understudy_run_remaining_seconds",
            "Seconds that the training takes at this rate.",
            None if progress is None else progress.remaining_seconds,
        )
        metrics = GaugeMetricFamily("understudy_run_metric", "Loss and metrics of the training.", labels=["metric"])
        for name, value in ({} if progress is None else progress.metrics).items():
            metrics.add_metric([name], value)
        yield metrics
