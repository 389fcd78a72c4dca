"""The service's registry of metrics, and the metrics of calls, requests and their batches.

Calls have the metric names and labels of go-grpc-middleware, which dashboards expect.
"""

from __future__ import annotations

import copy
import threading
import time
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from understudy.evaluator.observer import Operation
from understudy.service.calls.methods import RpcMethod
from understudy.service.calls.status import Code
from understudy.service.calls.trace import TracedBatch, TraceIds, join_batch


def new_registry() -> CollectorRegistry:
    """Return an empty registry.

    Turns off prometheus_client's ``_created`` series in this process: they would double the number of series, and
    Prometheus does not use them.
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


def samples_of(registry: CollectorRegistry) -> Iterator[Sample]:
    """Yield the values of all series. Thread-safe."""
    for family in registry.collect():
        yield from family.samples


class Tally:
    """The bucket counts and the sum of a histogram.

    Plain numbers, since prometheus_client's histogram takes two locks and scans the buckets for each value. One thread
    at a time may write; reading from another is safe.

    Args:
        bounds: The upper bounds of the buckets, ascending; an unbounded bucket is added.
    """

    __slots__ = ("_bounds", "_exemplars", "_fell_into", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self._fell_into = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._fell_into[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def exemplify(self, value: float, ids: TraceIds) -> None:
        """Name the trace of a counted value, in place of the one that its bucket named before."""
        self._exemplars[bisect_left(self._bounds, value)] = Exemplar(ids._asdict(), value, time.time())

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Return the buckets for exposition: the number of values up to each bound, and a trace of some of them."""
        bounds = map(floatToGoString, (*self._bounds, inf))
        counts = map(float, accumulate(self._fell_into))
        return [
            (bound, count) if exemplar is None else (bound, count, exemplar)
            for bound, count, exemplar in zip(bounds, counts, self._exemplars, strict=True)
        ]


class TalliedHistogram(Collector):
    """A metric of one `Tally`, with the same thread-safety.

    Args:
        name: The metric's name.
        text: What it measures.
        bounds: The upper bounds of its buckets.
        registry: Where to register it.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._tally = Tally(bounds)
        self.observe = self._tally.observe
        self.exemplify = self._tally.exemplify
        registry.register(self)

    def observe_each(self, values: Iterable[float]) -> None:
        """Count several values."""
        observe = self.observe
        for value in values:
            observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric."""
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], self._tally.buckets(), self._tally.sum)
        yield family


HANDLING_BUCKETS_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""From 100 µs, the cost of the transport alone."""

_LABELS = ("grpc_type", "grpc_service", "grpc_method")


class MethodMetrics:
    """The counts and durations of one method. `RpcMetrics` creates and shows it; `ServedMethod` counts.

    Plain numbers, since each call updates six of them: prometheus_client's counters take a lock for each, and only the
    event loop's thread counts calls. Reading them from another thread is safe.
    """

    __slots__ = ("ended", "method", "received_messages", "seconds", "sent_messages", "started_calls")

    def __init__(self, method: RpcMethod) -> None:
        self.method = method
        self.started_calls = 0
        self.received_messages = 0
        self.sent_messages = 0
        self.ended = [0] * len(Code)
        self.seconds = Tally(HANDLING_BUCKETS_SECONDS)

    def handled(self, code: Code, *, seconds: float) -> None:
        """Count a call that ended, with its status and duration."""
        self.ended[code] += 1
        self.seconds.observe(seconds)


class RpcMetrics(Collector):
    """The ``grpc_server_*`` metrics, with every series of every method from the start.

    Belongs to the event loop's thread, but may be collected on any.

    Args:
        registry: Where to register them.
        methods: The methods.
    """

    def __init__(self, registry: CollectorRegistry, methods: Iterable[RpcMethod] = ()) -> None:
        self._methods = {method.path: MethodMetrics(method) for method in methods}
        registry.register(self)

    def of(self, path: str) -> MethodMetrics:
        """Return the series of a method by its path, such as ``/package.Service/Method``.

        Raises:
            KeyError: There is no such method.
        """
        return self._methods[path]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        started = CounterMetricFamily("grpc_server_started", "Calls started on the server.", labels=_LABELS)
        handled = CounterMetricFamily(
            "grpc_server_handled", "Calls ended on the server, by status.", labels=(*_LABELS, "grpc_code")
        )
        received = CounterMetricFamily("grpc_server_msg_received", "Messages received from callers.", labels=_LABELS)
        sent = CounterMetricFamily("grpc_server_msg_sent", "Messages sent to callers.", labels=_LABELS)
        handling = HistogramMetricFamily(
            "grpc_server_handling_seconds",
            "Seconds from the start of a call on the server to its end.",
            labels=_LABELS,
        )
        for counted in self._methods.values():
            labels = (counted.method.rpc_type, counted.method.service, counted.method.name)
            started.add_metric(labels, counted.started_calls)
            received.add_metric(labels, counted.received_messages)
            sent.add_metric(labels, counted.sent_messages)
            handling.add_metric(labels, counted.seconds.buckets(), counted.seconds.sum)
            for code in Code:
                handled.add_metric((*labels, code.label), counted.ended[code])
        yield from (started, handled, received, sent, handling)


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
        statistics = self._steps.get(step)
        if statistics is None:
            statistics = self._steps[step] = StepStatistics()
            if len(self._steps) > REMEMBERED_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(step)
        return statistics


DURATION_BUCKETS_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
EXAMPLE_BUCKETS = tuple(float(2**exponent) for exponent in range(13))

OPERATIONS: tuple[Operation, ...] = ("predict", "evaluate")
REJECTIONS = ("queue_full", "deadline", "unmeetable", "cancelled", "invalid", "draining")


class ServedTraffic(Protocol):
    """Counts what this server answers, for the evaluator that it follows. Thread-safe; quick."""

    def batch_computed(self, step: int, queue_seconds: Sequence[float], compute_seconds: float) -> None:
        """A batch of requests was computed at a step."""

    def request_failed(self, step: int) -> None:
        """The computation of a request failed."""

    def rejected(self, reason: str) -> None:
        """A request was refused or dropped."""


class RequestObserver:
    """Keeps the metrics of requests and their batches, and the statistics of each version. Thread-safe.

    It is the part of an `understudy.evaluator.observer.Observer` that is called for every request.

    Args:
        registry: Where to register the metrics.
        statistics: Keeps the statistics of every version.
        is_tracing: Whether predictions may be traced.
        traffic: Counts for the evaluator that is followed over the network; None if there is none.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        statistics: InferenceStatistics,
        is_tracing: bool = False,
        traffic: ServedTraffic | None = None,
    ) -> None:
        self._is_tracing = is_tracing
        self._traffic = traffic
        self._statistics = statistics

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
            if self._is_tracing and (
                batch := join_batch(
                    tokens,
                    queue_seconds=queue_seconds,
                    fill_seconds=fill_seconds,
                    compute_seconds=compute_seconds,
                    examples=examples,
                    step=step,
                )
            ):
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
