"""The threads that deliver events, one for each destination, and their metrics."""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.outbox import LONGEST_RETRY_SECONDS, Delivery, Outbox
from understudy.service.events.exporter import DeliveryError, Exporter

POLL_SECONDS: Final = 1.0
"""How often to look for events that are due again, or were sent again from the command line."""

CLOSE_SECONDS: Final = 5.0
"""How long the threads go on to deliver what waits, while nothing fails, when they are closed."""

_JOIN_SECONDS: Final = 20.0
_LONGEST_CALL_SECONDS: Final = 12.0
"""How long an exporter may take, before and after the threads are closed, until its thread is left behind."""
_LONGEST_PAUSE_SECONDS: Final = 30.0
_MOST_DOUBLINGS: Final = 20
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/@]+@")
"""The user and the password in a URL, which libraries put into their errors."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """When an event is tried again.

    Attributes:
        for_seconds: How long after the first attempt an event that fails becomes a dead letter.
        first_seconds: The pause after the first attempt; it doubles with each, up to the longest.
        longest_seconds: The longest pause.
    """

    for_seconds: float
    first_seconds: float = 1.0
    longest_seconds: float = LONGEST_RETRY_SECONDS

    def pause(self, failures: int, *, longest: float = math.inf) -> float:
        """Return the pause after so many failures, drawn from its upper half, so that not all return at once."""
        most = min(self.longest_seconds, longest)
        seconds = min(self.first_seconds * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), most)
        return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


class DeliveryObserver(Protocol):
    """Counts attempts. Called from several threads; must be quick and must not raise."""

    def sent(self, destination: str) -> None:
        """An event was delivered."""

    def failed(self, destination: str) -> None:
        """An attempt failed."""


class Deliveries:
    """Delivers the events of an outbox. `start` and `close` are for one thread.

    Args:
        outbox: Holds the events.
        makers: Creates the exporter of each destination, on the thread that it will have.
        retry: When an event is tried again.
        observer: Counts attempts.
        close_seconds: How long `close` lets the threads deliver what waits.
    """

    def __init__(
        self,
        outbox: Outbox,
        makers: Mapping[str, Callable[[], Exporter]],
        *,
        retry: RetryOptions,
        observer: DeliveryObserver,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._outbox = outbox
        self._closing = threading.Event()
        self._close_seconds = close_seconds
        self._threads: Sequence[_DeliveryThread] = [
            _DeliveryThread(name, make, outbox, retry=retry, observer=observer, closing=self._closing)
            for name, make in makers.items()
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Deliver what is due for a moment, while nothing fails, and end the threads. Blocks. Idempotent.

        A thread whose exporter does not return is left behind; its event is delivered again after the next start.
        """
        stop_at = time.monotonic() + self._close_seconds
        for thread in self._threads:
            thread.stop_at = stop_at
        self._closing.set()
        self._outbox.wake()
        until = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            while thread.is_alive() and (left := min(until, thread.gives_up_at) - time.monotonic()) > 0:
                thread.join(left)
            if thread.is_alive():
                _log.warning("an exporter did not return; its event is delivered again", thread=thread.name)


def have_left_exporters() -> bool:
    """Return whether an exporter has not returned. Then the hooks of its library may keep the process from ending."""
    return any(isinstance(thread, _DeliveryThread) for thread in threading.enumerate())


class _DeliveryThread(threading.Thread):
    def __init__(
        self,
        destination: str,
        make: Callable[[], Exporter],
        outbox: Outbox,
        *,
        retry: RetryOptions,
        observer: DeliveryObserver,
        closing: threading.Event,
    ) -> None:
        super().__init__(name=f"understudy-events-{destination}", daemon=True)
        self.stop_at = math.inf
        self.gives_up_at = math.inf
        self._destination = destination
        self._make = make
        self._outbox = outbox
        self._retry = retry
        self._observer = observer
        self._closing = closing
        self._exporter: Exporter | None = None

    def run(self) -> None:
        seen, failures = 0, 0
        while not (self._closing.is_set() and (failures or time.monotonic() > self.stop_at)):
            try:
                delivery = self._outbox.next(self._destination)
                if delivery is not None:
                    failures = 0 if self._deliver(delivery) else failures + 1
            except LedgerError as error:
                failures += 1
                _log.warning("cannot read or write the events", destination=self._destination, reason=str(error))
                delivery = None
            if failures:
                self._closing.wait(self._retry.pause(failures, longest=_LONGEST_PAUSE_SECONDS))
            elif delivery is None:
                if self._closing.is_set():
                    break
                seen = self._outbox.wait(seen, POLL_SECONDS)
        if self._exporter is not None:
            try:
                with self._timed():
                    self._exporter.close()
            except Exception:  # noqa: BLE001 - of the user's or a library's
                _log.exception("an exporter cannot be closed", destination=self._destination)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Call the exporter, for which `Deliveries.close` waits for a while only."""
        self.gives_up_at = time.monotonic() + _LONGEST_CALL_SECONDS
        try:
            yield
        finally:
            self.gives_up_at = math.inf

    def _deliver(self, delivery: Delivery) -> bool:
        """Try to deliver an event; return whether that succeeded."""
        try:
            with self._timed():
                if self._exporter is None:
                    self._exporter = self._make()
                self._exporter.export(delivery.event)
        except Exception as error:  # noqa: BLE001 - an exporter may raise anything; it is recorded
            self._note_failure(delivery, error)
            return False
        self._outbox.delivered(delivery)
        self._observer.sent(self._destination)
        return True

    def _note_failure(self, delivery: Delivery, error: Exception) -> None:
        text = str(error) if isinstance(error, DeliveryError) else f"{type(error).__name__}: {error}"
        reason = _CREDENTIALS.sub("", text)
        tried_seconds = 0.0 if delivery.first_attempt_at is None else time.time() - delivery.first_attempt_at
        is_dead = delivery.attempts > 0 and tried_seconds >= self._retry.for_seconds
        pause = None if is_dead else self._retry.pause(delivery.attempts + 1)
        self._observer.failed(self._destination)
        self._outbox.failed(delivery, reason, retry_after_seconds=pause)
        event = delivery.event
        _log.warning(
            "event is a dead letter" if is_dead else "event not delivered, to be tried again",
            destination=self._destination,
            id=event.id,
            type=event.type.value,
            step=event.step,
            attempts=delivery.attempts + 1,
            reason=reason,
        )


class EventMetrics(Collector):
    """Counts what becomes of events, and shows what waits. Thread-safe.

    It is an `understudy.service.events.deliveries.DeliveryObserver`.

    Args:
        registry: Where to register the metrics.
        destinations: The destinations whose series are there from the beginning.
        outbox: Holds the events; None if there are no destinations.
    """

    def __init__(self, registry: CollectorRegistry, destinations: Iterable[str], outbox: Outbox | None) -> None:
        self._outbox = outbox
        self._sent = Counter(
            "understudy_events_sent_total", "Events that were delivered.", ["destination"], registry=registry
        )
        self._failed = Counter(
            "understudy_events_failed_total",
            "Attempts to deliver an event that failed.",
            ["destination"],
            registry=registry,
        )
        for destination in destinations:
            self._sent.labels(destination)
            self._failed.labels(destination)
        registry.register(self)

    def sent(self, destination: str) -> None:
        """See `DeliveryObserver`."""
        self._sent.labels(destination).inc()

    def failed(self, destination: str) -> None:
        """See `DeliveryObserver`."""
        self._failed.labels(destination).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield what waits now; nothing while the ledger cannot be read."""
        waiting = GaugeMetricFamily("understudy_events_waiting", "Events that wait.", labels=["destination"])
        dead = GaugeMetricFamily(
            "understudy_events_dead",
            "Events that could not be delivered in time: dead letters.",
            labels=["destination"],
        )
        dropped = CounterMetricFamily(
            "understudy_events_dropped",
            "Events that were dropped, as too many waited or were dead letters.",
            labels=["destination"],
        )
        if self._outbox is not None:
            try:
                counts = self._outbox.counts()
            except LedgerError:
                counts = {}
            lost = self._outbox.dropped()
            for destination, count in counts.items():
                waiting.add_metric([destination], count.waiting)
                dead.add_metric([destination], count.dead)
                dropped.add_metric([destination], lost.get(destination, 0))
        yield from (waiting, dead, dropped)
