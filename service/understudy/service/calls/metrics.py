"""The service's registry of metrics and its exposition, histograms for frequent observations, and the metrics of calls.

Calls have the metric names and labels of go-grpc-middleware, which dashboards expect.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Literal

import prometheus_client
from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from understudy.service.calls.status import Code
from understudy.service.calls.trace import TraceIds


def new_registry() -> CollectorRegistry:
    """Return an empty registry.

    Turns off prometheus_client's ``_created`` series in this process: they would double the number of series, and
    Prometheus does not use them.
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return the exposition of every metric. Thread-safe.

    Args:
        registry: The registry of the metrics.
        accept: An HTTP Accept header; Prometheus' text format if it is empty, OpenMetrics if it accepts that.

    Returns:
        The exposition and its content type.
    """
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


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


_REFUSALS = ("unauthenticated", "permission_denied", "limit")


class RefusalCounter:
    """Counts refused calls by reason.

    Args:
        registry: Where to register the metric.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = Counter(
            "understudy_refused_calls_total",
            "Calls refused for their caller: it is not known, lacks the group, or is beyond its limits (--callers).",
            ["reason"],
            registry=registry,
        )
        self.count = {reason: counter.labels(reason).inc for reason in _REFUSALS}


RpcType = Literal["unary", "client_stream", "server_stream", "bidi_stream"]

HANDLING_BUCKETS_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""From 100 µs, the cost of the transport alone."""

_LABELS = ("grpc_type", "grpc_service", "grpc_method")


@dataclass(frozen=True, kw_only=True)
class RpcMethod:
    """One method of one service."""

    service: str
    name: str
    rpc_type: RpcType

    @property
    def path(self) -> str:
        """The method's path in HTTP/2."""
        return f"/{self.service}/{self.name}"

    @property
    def streams_requests(self) -> bool:
        """Whether its callers send any number of messages."""
        return self.rpc_type in {"client_stream", "bidi_stream"}

    @property
    def streams_responses(self) -> bool:
        """Whether its callers get any number of messages."""
        return self.rpc_type in {"server_stream", "bidi_stream"}


def methods_of(*services: ServiceDescriptor) -> Iterator[RpcMethod]:
    """Yield every method of services."""
    types: dict[tuple[bool, bool], RpcType] = {
        (False, False): "unary",
        (True, False): "client_stream",
        (False, True): "server_stream",
        (True, True): "bidi_stream",
    }
    for service in services:
        for method in service.methods:
            rpc_type = types[method.client_streaming, method.server_streaming]
            yield RpcMethod(service=service.full_name, name=method.name, rpc_type=rpc_type)


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
        methods: The initial methods; `add` adds more.
    """

    def __init__(self, registry: CollectorRegistry, methods: Iterable[RpcMethod] = ()) -> None:
        self._methods: dict[str, MethodMetrics] = {}
        self.add(methods)
        registry.register(self)

    def add(self, methods: Iterable[RpcMethod]) -> None:
        """Show every series of more methods. Call it before they are used."""
        self._methods = self._methods | {method.path: MethodMetrics(method) for method in methods}

    def of(self, path: str) -> MethodMetrics:
        """Return the series of a method by its path, such as ``/package.Service/Method``.

        Raises:
            KeyError: The method was not added.
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
