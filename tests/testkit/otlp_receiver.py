"""A receiver of OpenTelemetry's traces over OTLP/HTTP, which keeps what it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_SECONDS = 100.0


@dataclass
class ReceivedSpan:
    """One span, with its ids as hexadecimal digits."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    status: int
    message: str
    service: str


@dataclass
class OtlpReceiver:
    """A running receiver.

    Attributes:
        url: Its base URL.
        spans: Every span so far.
        status: The HTTP status that it answers with.
        answering: Cleared to let requests wait.
    """

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: int = 0
    status: int = 200
    answering: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, condition: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Wait until the condition holds for the spans, and return them."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.spans), WAIT_SECONDS), [s.name for s in self.spans]
            return list(self.spans)

    def trace_with(self, name: str, *, spans: int = 1) -> dict[str, ReceivedSpan]:
        """Wait for this many spans of the trace that has a span of this name, and return them by their names."""
        found: list[ReceivedSpan] = []

        def is_complete(received: list[ReceivedSpan]) -> bool:
            trace = next((span.trace_id for span in received if span.name == name), None)
            found[:] = [span for span in received if span.trace_id == trace]
            return len(found) >= spans

        self.wait_for(is_complete)
        return {span.name: span for span in found}

    def take(self, body: bytes) -> None:
        """Keep the spans of a request."""
        request = ExportTraceServiceRequest.FromString(body)
        with self.changed:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_received(span, service) for span in scope.spans]
            self.requests += 1
            self.changed.notify_all()


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Run a receiver on a free port."""
    receiver = OtlpReceiver()
    receiver.answering.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            receiver.answering.wait(WAIT_SECONDS)
            if receiver.status == 200:
                receiver.take(body)
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class names it
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="otlp-receiver")
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        receiver.answering.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _received(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        status=span.status.code,
        message=span.status.message,
        service=service,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
