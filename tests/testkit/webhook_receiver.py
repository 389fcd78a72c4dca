"""A real HTTP server that receives webhooks, and checks each with the reference libraries."""

from __future__ import annotations

import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from standardwebhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the example of the specification
WAIT_SECONDS = 100.0

Answer = Callable[[BaseHTTPRequestHandler], None]
"""Answers a request instead of 204."""


@dataclass(frozen=True)
class Received:
    """A request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def verified(self, secret: str = SECRET) -> BaseCloudEvent:
        """Return the event, whose signature the reference library verifies, and whose format the SDK reads."""
        Webhook(secret).verify(self.body, self.headers)
        return from_http_event(HTTPMessage(headers=self.headers, body=self.body))


@dataclass
class Receiver:
    """Requests in the order of their arrival, and how to answer the next ones.

    Attributes:
        url: Where to post to.
        answers: How the next requests are answered, one after the other.
        always: How the requests after these are answered.
        released: What `hang` waits for.
    """

    url: str = ""
    received: list[Received] = field(default_factory=list)
    answers: deque[Answer] = field(default_factory=deque)
    always: Answer | None = None
    released: threading.Event = field(default_factory=threading.Event)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, count: int) -> list[Received]:
        """Wait until so many requests have arrived, and return all."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.received) >= count, WAIT_SECONDS), self.received
            return list(self.received)

    def events(self, count: int) -> list[tuple[str, str]]:
        """Wait for so many requests; return the type and subject of each, all verified."""
        found = [each.verified() for each in self.wait_for(count)]
        return [(each.get_type().rpartition(".")[2], str(each.get_subject())) for each in found]

    def take(self, request: BaseHTTPRequestHandler) -> Answer | None:
        """Add a request, and return how to answer it."""
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in request.headers.items()}
        with self._arrived:
            self.received.append(Received(request.path, headers, body))
            self._arrived.notify_all()
            return self.answers.popleft() if self.answers else self.always

    def hang(self, _request: BaseHTTPRequestHandler) -> None:
        """Answer nothing until `released`."""
        self.released.wait(WAIT_SECONDS)


def status(code: int, **headers: str) -> Answer:
    """Return an answer with a status."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("content-length", "0")
        request.end_headers()

    return answer


@contextmanager
def receiving(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Receive webhooks until the block ends, over TLS if there is a context."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            (receiver.take(self) or status(204))(self)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library names it
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Stay silent about callers that hung up."""

    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver.url = f"http{'s' if context else ''}://127.0.0.1:{server.server_port}/events"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        thread.join(WAIT_SECONDS)
        server.server_close()
