"""The metrics of a fleet: of the evaluator about the servers that follow it, and of a server that follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.service.fleet.fleet_state import Fleet

LAG_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Link(Protocol):
    """The connection of a server that follows."""

    @property
    def is_connected(self) -> bool:
        """Whether the evaluator answers."""


class FleetMetrics(Collector):
    """Shows the servers that follow. Thread-safe.

    Args:
        registry: Where to register the metrics.
        link: The connection with which this server follows another evaluator; None if it follows none.
    """

    def __init__(self, registry: CollectorRegistry, link: Link | None = None) -> None:
        self._link = link
        self.lag = Histogram(
            "understudy_fleet_lag_seconds",
            "Seconds from a decision of this evaluator until a server that follows it served the version.",
            buckets=LAG_BUCKETS_SECONDS,
            registry=registry,
        )
        self.fleet = Fleet(on_carried_out=self.lag.observe)
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        status = self.fleet.status()
        connected = [server for server in status.servers if server.connected]
        servers = GaugeMetricFamily(
            "understudy_fleet_servers",
            "Servers that follow this evaluator, by the step that they serve; empty before the first.",
            labels=["step"],
        )
        for step, count in sorted(Counter(server.step for server in connected).items(), key=str):
            servers.add_metric(["" if step is None else str(step)], count)
        yield servers
        yield GaugeMetricFamily(
            "understudy_fleet_servers_behind",
            "Connected servers that follow this evaluator, and do not serve what it decided last.",
            value=status.behind,
        )
        if self._link is not None:
            yield GaugeMetricFamily(
                "understudy_following",
                "1 if the evaluator that this server follows at its addresses answers, else 0.",
                value=float(self._link.is_connected),
            )
