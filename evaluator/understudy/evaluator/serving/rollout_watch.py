"""What servers report during a rollout, and whether it speaks against the new version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from understudy.evaluator.rollout_plan import RolloutPlan, ShadowPlan, in_words
from understudy.evaluator.serving.rollout_file import RunningRollout
from understudy.evaluator.serving.rollout_health import ServerReport, Tally, Traffic, complaint
from understudy.evaluator.serving.shadow_health import ShadowTally, shadow_complaint, shadow_numbers
from understudy.evaluator.types import CheckpointKey

FAILING_SECONDS: Final = 10.0
"""How long a server may say that it cannot serve the version, or compute requests with it."""

FIRST_SERVED_SECONDS: Final = 900.0
"""How long it may take until one of the servers serves the version, or has it loaded."""

LOST_SECONDS: Final = 60.0
"""How long none of them may serve the version after one did."""


OWN_NAME: Final = ""
"""The name of the evaluator's own report, whose counts begin with its process."""


class Watch(Protocol):
    """Watches one rollout. For one thread."""

    def observe(
        self, running: RunningRollout, before: CheckpointKey | None, servers: Sequence[ServerReport], now: float
    ) -> bool:
        """Take the reports of the servers; return whether one of them uses the new version.

        Args:
            running: The rollout.
            before: What all but the part serve.
            servers: The connected servers.
            now: The time, on a monotonic clock, in seconds.
        """

    def counted(self, running: RunningRollout) -> RunningRollout:
        """Return the rollout with what was counted."""

    def objection(self, running: RunningRollout, now: float) -> str:
        """Return why the version is rolled back; empty if it is not."""

    def numbers(self, running: RunningRollout) -> Mapping[str, float]:
        """Return the numbers for the ledger."""


def watch_of(plan: RolloutPlan, running: RunningRollout | None, now: float) -> Watch:
    """Return what watches a rollout of a plan, which goes on with one that is under way."""
    if isinstance(plan, ShadowPlan):
        return ShadowWatch(plan, running, now)
    return CanaryWatch(now)


class _Failing:
    """Since when which servers have said why they cannot use the version."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._reasons: Mapping[str, str] = {}

    def note(self, reasons: Mapping[str, str], now: float) -> None:
        self._since = {name: self._since.get(name, now) for name, reason in reasons.items() if reason}
        self._reasons = reasons

    def objection(self, what: str, now: float) -> str:
        for name, since in self._since.items():
            if now - since >= FAILING_SECONDS:
                who = "the evaluator" if name == OWN_NAME else f"server {name}"
                return f"{who} does not {what} it: {self._reasons[name]}"
        return ""


class CanaryWatch:
    """Watches a version that a part of the servers serves. It is a `Watch`."""

    def __init__(self, now: float) -> None:
        self._served_at = now
        self._was_served = False
        self._failing = _Failing()
        self._part, self._others = Tally(), Tally()

    def observe(
        self, running: RunningRollout, before: CheckpointKey | None, servers: Sequence[ServerReport], now: float
    ) -> bool:
        """See `Watch`."""
        followers = {server.name: server for server in servers}
        is_served = False
        for server in followers.values():
            is_part = server.name in running.servers
            is_served |= is_part and server.key == running.key
            if server.traffic is None or server.key != (running.key if is_part else before):
                continue
            (self._part if is_part else self._others).add(server.name, server.traffic, from_zero=is_part)
        self._failing.note({name: followers[name].reason for name in running.servers if name in followers}, now)
        if is_served or not any(name not in running.servers for name in followers):
            self._served_at, self._was_served = now, self._was_served or is_served
        return is_served

    def counted(self, running: RunningRollout) -> RunningRollout:
        """See `Watch`."""
        return running

    def objection(self, running: RunningRollout, now: float) -> str:
        """See `Watch`."""
        if failing := self._failing.objection("serve", now):
            return failing
        patience = LOST_SECONDS if self._was_served else FIRST_SERVED_SECONDS
        if now - self._served_at >= patience:
            return f"none of the servers {', '.join(running.servers)} has served it for {in_words(patience)}"
        return complaint(self._part.total, self._others.total)

    def numbers(self, running: RunningRollout) -> Mapping[str, float]:
        """See `Watch`."""
        return {
            "canary_servers": len(running.servers),
            **_numbers("canary", self._part.total),
            **_numbers("other", self._others.total),
        }


class ShadowWatch:
    """Watches a version that computes a part of the requests once more. It is a `Watch`.

    Args:
        plan: What is compared.
        running: The rollout that goes on; None if it is new.
        now: The time, on a monotonic clock, in seconds.
    """

    def __init__(self, plan: ShadowPlan, running: RunningRollout | None, now: float) -> None:
        self._plan = plan
        self._loaded_at = now
        self._failing = _Failing()
        self._tally = ShadowTally() if running is None else ShadowTally(running.shadow, running.shadow_servers)

    def observe(
        self, running: RunningRollout, before: CheckpointKey | None, servers: Sequence[ServerReport], now: float
    ) -> bool:
        """See `Watch`."""
        del before
        reports = {
            server.name: server.shadow
            for server in servers
            if server.shadow is not None and (server.shadow.step, server.shadow.digest) == running.key
        }
        for name, report in reports.items():
            self._tally.add(name, report.counts)
        self._failing.note({name: report.reason for name, report in reports.items()}, now)
        is_loaded = any(report.loaded for report in reports.values())
        if is_loaded or not reports:
            self._loaded_at = now
        return is_loaded

    def counted(self, running: RunningRollout) -> RunningRollout:
        """See `Watch`."""
        servers = {name: counts for name, counts in self._tally.last.items() if name != OWN_NAME}
        return replace(running, shadow=self._tally.total, shadow_servers=servers)

    def objection(self, running: RunningRollout, now: float) -> str:
        """See `Watch`."""
        del running
        if failing := self._failing.objection("compute with", now):
            return failing
        if now - self._loaded_at >= FIRST_SERVED_SECONDS:
            return f"no server has had it loaded for {in_words(FIRST_SERVED_SECONDS)}"
        return shadow_complaint(self._tally.total, self._plan)

    def numbers(self, running: RunningRollout) -> Mapping[str, float]:
        """See `Watch`."""
        del running
        return shadow_numbers(self._tally.total)


def _numbers(whose: str, traffic: Traffic) -> dict[str, float]:
    return {
        f"{whose}_requests": traffic.requests,
        f"{whose}_errors": traffic.errors,
        f"{whose}_p99_seconds": traffic.p99_seconds,
    }
