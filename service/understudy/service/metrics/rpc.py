"""Counts and times calls under the names and labels of go-grpc-middleware, which dashboards expect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry, Counter, Histogram

from understudy.service.dataplane.codes import Code

RpcType = Literal["unary", "client_stream", "server_stream", "bidi_stream"]

HANDLING_BUCKETS_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""From 100 µs, which is what the transport alone costs."""

_LABELS = ("grpc_type", "grpc_service", "grpc_method")


@dataclass(frozen=True, kw_only=True)
class RpcMethod:
    """One method of one service."""

    service: str
    name: str
    rpc_type: RpcType

    @property
    def path(self) -> str:
        """The method as HTTP/2 names it."""
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
    """The series of one method, bound once, since looking up labels costs time. Thread-safe. `RpcMetrics` makes it."""

    def __init__(
        self, *, started: Counter, received: Counter, sent: Counter, handling: Histogram, handled: dict[Code, Counter]
    ) -> None:
        self.started = started.inc
        self.received = received.inc
        self.sent = sent.inc
        self._handling = handling
        self._handled = handled

    def handled(self, code: Code, *, seconds: float) -> None:
        """Count a call that ended, whatever way."""
        self._handled[code].inc()
        self._handling.observe(seconds)


class RpcMetrics:
    """The ``grpc_server_*`` metrics, with every series of every method there from the start.

    Args:
        registry: Where to register them.
        methods: The methods there are, unless they are added later.
    """

    def __init__(self, registry: CollectorRegistry, methods: Iterable[RpcMethod] = ()) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*_LABELS, *more), registry=registry)

        self._started = counter("grpc_server_started_total", "Calls started on the server.")
        self._handled = counter("grpc_server_handled_total", "Calls ended on the server, by status.", "grpc_code")
        self._received = counter("grpc_server_msg_received_total", "Messages received from callers.")
        self._sent = counter("grpc_server_msg_sent_total", "Messages sent to callers.")
        self._handling = Histogram(
            "grpc_server_handling_seconds",
            "Seconds from the start of a call on the server to its end.",
            _LABELS,
            buckets=HANDLING_BUCKETS_SECONDS,
            registry=registry,
        )
        self._methods: dict[str, MethodMetrics] = {}
        self.add(methods)

    def add(self, methods: Iterable[RpcMethod]) -> None:
        """Show every series of more methods. Call it before they are."""
        self._methods |= {method.path: self._bind(method) for method in methods}

    def of(self, path: str) -> MethodMetrics:
        """Return the series of a method by its path, such as ``/package.Service/Method``.

        Raises:
            KeyError: The method was not among those given.
        """
        return self._methods[path]

    def _bind(self, method: RpcMethod) -> MethodMetrics:
        labels: tuple[Any, ...] = (method.rpc_type, method.service, method.name)
        return MethodMetrics(
            started=self._started.labels(*labels),
            received=self._received.labels(*labels),
            sent=self._sent.labels(*labels),
            handling=self._handling.labels(*labels),
            handled={code: self._handled.labels(*labels, code.label) for code in Code},
        )
