"""Prometheus metrics of a training task, served over HTTP."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections import OrderedDict
from socketserver import ThreadingMixIn
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

from understudy.trainer.progress import ProgressUpdate
from understudy.trainer.trainer_errors import MetricsError

_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class TrainingMetrics:
    """Keeps a task's metrics, and serves ``/metrics`` while its ``with`` block runs. Counts begin at this start.

    Args:
        port: The port; None to serve nothing.
        host: The address to listen on.
        first_step: Steps done by earlier starts.
        global_batch_size: Examples per step.
        restarts: How often a supervisor has restarted this task.
        registry: The registry of the metrics; a new one if None.

    Raises:
        MetricsError: On entering: the port is in use, or the host is not an address of this machine.
    """

    def __init__(
        self,
        port: int | None,
        *,
        host: str = "127.0.0.1",
        first_step: int,
        global_batch_size: int,
        restarts: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._port = port
        self._host = host
        self._step = first_step
        self._global_batch_size = global_batch_size
        self._registry = registry or CollectorRegistry()
        self._steps = Counter("understudy_train_steps", "Steps done.", registry=self._registry)
        self._examples = Counter("understudy_train_examples", "Examples trained on.", registry=self._registry)
        self._examples_per_second = Gauge(
            "understudy_train_examples_per_second", "Over all replicas, since the start.", registry=self._registry
        )
        self._loss = Gauge("understudy_train_loss", "Since the last checkpoint.", registry=self._registry)
        self._input_wait_seconds = Counter(
            "understudy_train_input_wait_seconds",
            "Seconds in which training waited for its input; its rate is the share of time.",
            registry=self._registry,
        )
        self._checkpoint_seconds = Histogram(
            "understudy_train_checkpoint_seconds",
            "Training stood still for a checkpoint.",
            buckets=_BUCKETS_SECONDS,
            registry=self._registry,
        )
        restarted = Gauge("understudy_train_restarts", "Starts after the first.", registry=self._registry)
        restarted.set(restarts)
        self._server: _MetricsServer | None = None
        self._thread: threading.Thread | None = None

    def advanced(self, update: ProgressUpdate) -> None:
        """Count the steps since the last call."""
        steps = update.step - self._step
        self._step = update.step
        self._steps.inc(steps)
        self._examples.inc(steps * self._global_batch_size)
        self._examples_per_second.set(update.examples_per_second)
        self._input_wait_seconds.inc(update.input_wait_seconds)
        self._loss.set(update.metrics.get("loss", float("nan")))

    def checkpointed(self, seconds: float) -> None:
        """Record the duration of a checkpoint in this task."""
        self._checkpoint_seconds.observe(seconds)

    def __enter__(self) -> Self:
        if self._port is None:
            return self
        try:
            self._server = _MetricsServer(self._host, self._port, self._registry)
        except OSError as error:
            raise MetricsError(
                f"--metrics-port {self._port} cannot be listened on at {self._host}: {error.strerror or error}"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="training-metrics", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


MAX_CONNECTIONS: Final = 16
"""The most connections at once: each has a thread and an open file of the training."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves the metrics of a registry. One connection more than the most takes the place of the oldest."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._lock = threading.Lock()
        self._open: OrderedDict[Any, None] = OrderedDict()
        super().__init__((host, port), _SilentHandler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver.BaseServer`."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest, _ = self._open.popitem(last=False)
                with contextlib.suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """See `socketserver.BaseServer`."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """See `socketserver.BaseServer`. Callers that went away, or are silent, are no errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _SilentHandler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
