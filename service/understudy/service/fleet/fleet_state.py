"""Which servers follow this evaluator, what each serves, and how long each took; and the metrics of that."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.evaluator.serving.decision_file import ServingDecision
from understudy.evaluator.serving.rollout_health import ServerReport, Traffic
from understudy.evaluator.serving.shadow_health import ShadowReport

MAX_SERVERS = 4096
"""The most servers that follow at once, and that are listed."""

REMEMBERED_SECONDS = 3600.0
"""How long a server that left is listed."""


@dataclass(frozen=True, kw_only=True)
class FleetServer:
    """A server that follows.

    Attributes:
        name: Its name.
        address: The address that it calls from.
        software_version: The version of its software.
        connected: Whether it is connected.
        current: Whether it is connected and serves what was decided last.
        step: The step that it serves, or served last; None before the first.
        digest: The digest of that checkpoint; empty before the first.
        serving_seconds: For how long it has served that; None before the first.
        lag_seconds: How long after a decision it served it, or, if it is behind, how long ago that was decided; None if
            it served it when it connected.
        reason: Why it does not serve what was decided last; empty if it does, or is about to.
        canary: Whether it is of the part that serves the version of a rollout.
    """

    name: str
    address: str
    software_version: str
    connected: bool
    current: bool
    step: int | None
    digest: str
    serving_seconds: float | None
    lag_seconds: float | None
    reason: str
    canary: bool


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """The fleet at one time.

    Attributes:
        decision: The present decision; None before the first.
        servers: The servers that follow, by name.
    """

    decision: ServingDecision | None
    servers: tuple[FleetServer, ...]

    @property
    def behind(self) -> int:
        """How many connected servers do not serve what was decided last."""
        return sum(server.connected and not server.current for server in self.servers)


class Member:
    """A server from its connection on. Its attributes are the fleet's own."""

    def __init__(self, name: str, address: str, software_version: str) -> None:
        self.name = name
        self.address = address
        self.software_version = software_version
        self.step: int | None = None
        self.digest = ""
        self.reason = ""
        self.traffic: Traffic | None = None
        self.shadow: ShadowReport | None = None
        self.since: float | None = None
        self.lag: float | None = None
        self.left_at: float | None = None


class Fleet:
    """Keeps what servers report. Thread-safe. All times are this machine's, so that other clocks do not matter.

    Args:
        clock: Monotonic clock, in seconds.
        on_carried_out: Called with the seconds that a connected server took to serve a decision.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, on_carried_out: Callable[[float], None] = lambda _: None
    ) -> None:
        self._clock = clock
        self._on_carried_out = on_carried_out
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._decision: ServingDecision | None = None
        self._decided_at = clock()

    def decided(self, decision: ServingDecision | None) -> None:
        """Take a decision of the evaluator; None if there has been none."""
        with self._lock:
            self._decision, self._decided_at = decision, self._clock()

    @contextmanager
    def joined(self, name: str, address: str, software_version: str) -> Iterator[Member]:
        """List a server while it is connected. It replaces one of its name that left.

        Raises:
            OverloadedError: There are too many.
        """
        member = Member(name, address, software_version)
        with self._lock:
            self._forget(name)
            if len(self._members) >= MAX_SERVERS and not self._forget_earliest():
                raise OverloadedError(f"{MAX_SERVERS} servers follow already", retry_after_seconds=10.0)
            self._members.append(member)
        try:
            yield member
        finally:
            with self._lock:
                member.left_at = self._clock()

    def report(
        self,
        member: Member,
        step: int | None,
        digest: str,
        reason: str,
        *,
        traffic: Traffic | None = None,
        shadow: ShadowReport | None = None,
    ) -> None:
        """Take a report of what a server serves."""
        took = None
        with self._lock:
            member.reason, member.traffic, member.shadow = reason, traffic, shadow
            if (member.step, member.digest) == (step, digest):
                return
            is_first = member.since is None
            member.step, member.digest, member.since = step, digest, self._clock()
            if not is_first and self._is_decided(member):
                took = member.lag = self._clock() - self._decided_at
        if took is not None:
            self._on_carried_out(took)

    def followers(self) -> list[ServerReport]:
        """Return the connected servers, in the order in which they came."""
        with self._lock:
            return [
                ServerReport(
                    name=member.name,
                    key=(member.step, member.digest),
                    reason=member.reason,
                    traffic=member.traffic,
                    shadow=member.shadow,
                )
                for member in self._members
                if member.left_at is None
            ]

    def status(self) -> FleetStatus:
        """Return the decision and every server."""
        with self._lock:
            self._forget(None)
            now = self._clock()
            servers = [self._described(member, now) for member in self._members]
            decision = self._decision
        return FleetStatus(decision=decision, servers=tuple(sorted(servers, key=lambda server: server.name)))

    def _forget(self, name: str | None) -> None:
        """Forget the servers that left long ago, or have this name."""
        earliest = self._clock() - REMEMBERED_SECONDS
        self._members = [
            member
            for member in self._members
            if member.left_at is None or (member.left_at >= earliest and member.name != name)
        ]

    def _forget_earliest(self) -> bool:
        """Forget the server that left first; return whether one had left."""
        gone = [member for member in self._members if member.left_at is not None]
        if gone:
            self._members.remove(min(gone, key=lambda member: member.left_at or 0.0))
        return bool(gone)

    def _is_decided(self, member: Member) -> bool:
        return self._decision is not None and self._decision.of(member.name).key == (member.step, member.digest)

    def _described(self, member: Member, now: float) -> FleetServer:
        connected, decided = member.left_at is None, self._is_decided(member)
        return FleetServer(
            name=member.name,
            address=member.address,
            software_version=member.software_version,
            connected=connected,
            current=connected and decided,
            step=member.step,
            digest=member.digest,
            serving_seconds=None if member.since is None else now - member.since,
            lag_seconds=member.lag if decided or self._decision is None else now - self._decided_at,
            reason="" if decided else member.reason or ("" if connected else "it is not connected"),
            canary=self._decision is not None
            and self._decision.canary is not None
            and member.name in self._decision.canary.servers,
        )


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
