"""Metrics from the evaluator's events."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from understudy.evaluator.observer import LoadOutcome, Operation
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.service.metrics.histogram import TalliedHistogram

DURATION_BUCKETS_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
LOAD_BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
EXAMPLE_BUCKETS = tuple(float(2**exponent) for exponent in range(13))

OPERATIONS: tuple[Operation, ...] = ("predict", "evaluate")
LOAD_OUTCOMES: tuple[LoadOutcome, ...] = ("loaded", "failed", "postponed")
REJECTIONS = ("queue_full", "deadline", "unmeetable", "cancelled", "invalid", "draining")


class MetricsObserver:
    """An `understudy.evaluator.observer.Observer` that keeps Prometheus metrics. Thread-safe.

    Args:
        registry: Where to register the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self._evaluation_metric = Gauge(
            "understudy_evaluation_metric",
            "The latest value of each metric of each dataset.",
            ["dataset", "metric"],
            registry=registry,
        )
        self._evaluation_step = Gauge(
            "understudy_evaluation_step", "The step that was scored last.", ["dataset"], registry=registry
        )
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
    ) -> None:
        """A batch left the device."""
        del step
        self._queue_seconds.observe_each(queue_seconds)
        self._fill_seconds.observe(fill_seconds)
        self._compute_seconds.observe(compute_seconds)
        self._batch_examples.observe(examples)
        self._examples[operation].inc(examples)

    def request_failed(self, *, step: int, seconds: float) -> None:
        """The computation of a request failed; ``grpc_server_handled_total`` counts it."""

    def queue_changed(self, examples: int) -> None:
        """The queue now holds this many examples."""
        self._queue_examples = examples

    def rejected(self, reason: str) -> None:
        """A request was refused or dropped."""
        self._rejected.labels(reason).inc()

    def function_traced(self) -> None:
        """A function was traced."""
        self._traces.inc()

    def checkpoint_loaded(self, outcome: LoadOutcome, *, seconds: float) -> None:
        """An attempt to load a checkpoint ended."""
        self._loads[outcome].inc()
        self._load_seconds.observe(seconds)

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger. Entries older than the one shown for the dataset are ignored."""
        if record.outcome is not EvaluationOutcome.SCORED:
            return
        with self._lock:
            if record.sequence <= self._shown.get(record.dataset, 0):
                return
            self._shown[record.dataset] = record.sequence
            self._evaluation_step.labels(record.dataset).set(record.step)
            for metric, value in record.metrics.items():
                self._evaluation_metric.labels(record.dataset, metric).set(value)
