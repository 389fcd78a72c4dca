"""A sample of the answered predictions of every protocol, passed to one thread, and its metrics."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.datasets.request_records import LoggedRequest
from understudy.evaluator.evaluation.drift_monitor import LiveDrift
from understudy.evaluator.types import Array, Arrays, Prediction
from understudy.service.calls.methods import CallContext
from understudy.service.calls.served_call import owner_of
from understudy.service.sample_gaps import SampleGaps

MAX_REQUESTS: Final = 1024
MAX_BYTES: Final = 64 * 1024 * 1024
"""The most that may wait for the thread; what is beyond either is dropped."""

TICK_SECONDS: Final = 1.0
JOIN_SECONDS: Final = 30.0

_log = structlog.get_logger(__name__)


class SampleConsumer(Protocol):
    """Takes the sampled requests, on one thread."""

    def take(self, request: LoggedRequest) -> None:
        """Take a request."""

    def tick(self) -> None:
        """Do what is due; called about every second."""

    def close(self) -> None:
        """End; called once, after the last request."""


class TrafficSample:
    """Draws a sample of the predictions and passes them, once they are answered, to a consumer on a thread of its own.

    It is an `understudy.service.handlers.prediction_handler.PredictionSampler`. Every request is drawn with the same
    probability, independently of the others. A request that finds the queue full is dropped and counted; a consumer
    that raises loses that request only.

    `wants_next` and `follow` belong to the event loop's thread; `start` and `close` may be called on any other.

    Args:
        consumer: Takes the requests.
        share: The probability of a request, above 0 and up to 1; or a function that returns it, 0 for none, which is
            called on the thread about every second.
        dropped: Called with the reason of each dropped request, ``queue`` or ``error``, on either thread.
        name: The name of the thread.
        generator: Draws the sample.
        max_requests: How many requests may wait for the thread.
        max_bytes: How much memory they may hold.
    """

    def __init__(
        self,
        consumer: SampleConsumer,
        *,
        share: float | Callable[[], float],
        dropped: Callable[[str], None],
        name: str,
        generator: random.Random | None = None,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._consumer = consumer
        self._share = share
        self._generator = random.random if generator is None else generator.random
        self._dropped = dropped
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._queue: SimpleQueue[tuple[LoggedRequest, int] | None] = SimpleQueue()
        self._put_bytes = 0  # written by the event loop's thread only
        self._taken_bytes = 0  # written by the consumer's thread only
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._present_share = self._share_now()
        self._gaps = self._drawn = SampleGaps(self._present_share, self._generator)  # the thread may replace the first
        self._others = self._gaps.draw()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Pass on what waits, close the consumer and join the thread. Blocks.

        Raises:
            TimeoutError: The thread did not end.
        """
        self._closed = True
        self._queue.put(None)
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the thread {self._thread.name} did not end within {JOIN_SECONDS:g} s")

    def wants_next(self) -> bool:
        """See `understudy.service.handlers.prediction_handler.PredictionSampler`."""
        if self._gaps is not self._drawn:
            self._drawn = self._gaps
            self._others = self._drawn.draw()
        self._others -= 1
        return self._others < 0

    def follow(self, future: asyncio.Future[Prediction], inputs: Arrays, call: CallContext) -> None:
        """See `understudy.service.handlers.prediction_handler.PredictionSampler`."""
        self._others = self._gaps.draw()
        caller = "" if call.caller is None else call.caller.name
        future.add_done_callback(partial(self._answered, inputs, call.method, caller))

    def _share_now(self) -> float:
        return self._share() if callable(self._share) else self._share

    def _follow_share(self) -> None:
        share = self._share_now()
        if share != self._present_share:
            self._present_share = share
            self._gaps = SampleGaps(share, self._generator)

    def _answered(self, inputs: Arrays, method: str, caller: str, future: asyncio.Future[Prediction]) -> None:
        if future.cancelled() or future.exception() is not None or self._closed:
            return
        outputs, step = future.result()
        size = sum(map(_held_bytes, inputs.values())) + sum(map(_held_bytes, outputs.values()))
        waiting = self._put_bytes - self._taken_bytes
        if self._queue.qsize() >= self._max_requests or waiting + size > self._max_bytes:
            self._dropped("queue")
            return
        self._put_bytes += size
        request = LoggedRequest(
            inputs=inputs, outputs=outputs, step=step, recorded_at=time.time(), method=method, caller=caller
        )
        self._queue.put((request, size))

    def _run(self) -> None:
        ticks_at = time.monotonic() + TICK_SECONDS
        while True:
            if time.monotonic() >= ticks_at:
                self._guarded(self._consumer.tick)
                self._follow_share()
                ticks_at = time.monotonic() + TICK_SECONDS
            try:
                found = self._queue.get(timeout=max(0.0, ticks_at - time.monotonic()))
            except Empty:
                continue
            if found is None:
                break
            request, size = found
            if not self._guarded(partial(self._consumer.take, request)):
                self._dropped("error")
            self._taken_bytes += size
            found = request = None  # type: ignore[assignment] # frees the arrays while this waits
        self._guarded(self._consumer.close)

    def _guarded(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception:  # noqa: BLE001 - logged; the thread goes on
            _log.exception("a sampled request could not be used; requests are answered all the same")
            return False
        return True


def _held_bytes(array: Array) -> int:
    """Return the memory that an array keeps from being freed, which for a slice of a batch is the batch's."""
    _, held = owner_of(array)
    strings = sum(map(len, array.ravel().tolist())) if array.dtype.kind == "O" else 0
    return max(held, array.nbytes) + strings


DROP_REASONS: Final = ("queue", "error", "disk", "too_large", "redaction")


class RequestLogMetrics:
    """Counts what becomes of the sampled requests. Thread-safe.

    It is an `understudy.evaluator.records.request_log.RequestLogObserver`.

    Args:
        registry: Where to register the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._written = Counter(
            "understudy_request_log_requests_total", "Sampled requests that were written.", registry=registry
        )
        self._dropped = Counter(
            "understudy_request_log_dropped_total",
            "Sampled requests that were not written: the queue was full, the disk was full or failed, a request was "
            "larger than a file, or an input to redact was missing.",
            ["reason"],
            registry=registry,
        )
        for reason in DROP_REASONS:
            self._dropped.labels(reason)
        self._size = Gauge("understudy_request_log_bytes", "Size of the files of the request log.", registry=registry)

    def written(self, requests: int) -> None:
        """See `RequestLogObserver`."""
        self._written.inc(requests)

    def dropped(self, reason: str, requests: int = 1) -> None:
        """See `RequestLogObserver`; ``queue`` and ``error`` are the sample's reasons."""
        self._dropped.labels(reason).inc(requests)

    def size_changed(self, size: int) -> None:
        """See `RequestLogObserver`."""
        self._size.set(size)


class DriftMetrics(Collector):
    """Shows the latest drift: two statistics for each feature, whose number is bounded. Thread-safe.

    Args:
        registry: Where to register the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._latest: LiveDrift | None = None
        self._dropped = Counter(
            "understudy_drift_dropped_total",
            "Sampled requests that do not count for the drift, as the queue was full or they failed.",
            registry=registry,
        )
        registry.register(self)

    def computed(self, drift: LiveDrift) -> None:
        """Show a result instead of the one before."""
        self._latest = drift

    def dropped(self, reason: str) -> None:
        """Count a dropped request."""
        del reason
        self._dropped.inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the latest drift. A feature that the serving version lacks has no series."""
        latest = self._latest
        drift = GaugeMetricFamily(
            "understudy_drift",
            "Distance of live inputs, outputs and classes from the reference's: psi (Population Stability Index) or ks "
            "(Kolmogorov-Smirnov).",
            labels=["kind", "feature", "statistic"],
        )
        for each in () if latest is None else (*latest.inputs.features, *latest.scores.features):
            drift.add_metric([each.kind, each.name, "psi"], each.psi)
            if each.ks is not None:
                drift.add_metric([each.kind, each.name, "ks"], each.ks)
        yield drift
        yield GaugeMetricFamily(
            "understudy_drift_examples",
            "Live examples that the drift is computed from.",
            value=0 if latest is None else latest.examples,
        )
