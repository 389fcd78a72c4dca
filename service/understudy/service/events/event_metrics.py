"""The metrics of events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.outbox import Outbox


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
