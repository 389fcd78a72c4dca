"""What this server answers, and what it computes once more, for the evaluator that it follows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from understudy.evaluator.serving.rollout_health import LATENCY_BOUNDS_SECONDS, Traffic, place_of, trimmed
from understudy.evaluator.serving.shadow_health import ShadowCounts, ShadowReport, shadow_counts
from understudy.v1 import fleet_pb2

_ERRORS: Final = frozenset({"queue_full", "deadline", "unmeetable", "invalid"})
"""The refusals that count as errors: a new version may be slow, or take other inputs than the callers send."""

_MOST: Final = 2**63 - 1
_LONGEST: Final = len(LATENCY_BOUNDS_SECONDS) + 1


class TrafficMeter:
    """Counts requests, errors and latencies of the serving version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[int | None, str] = (None, "")
        self._begin()

    def _begin(self) -> None:
        self._requests = self._errors = 0
        self._latencies = [0] * _LONGEST

    def serving(self, step: int | None, digest: str) -> None:
        """Count for this version from now on; from zero if it is another one than before."""
        with self._lock:
            if self._key != (step, digest):
                self._key = (step, digest)
                self._begin()

    def batch_computed(self, step: int, queue_seconds: Sequence[float], compute_seconds: float) -> None:
        """A batch of requests was computed at a step."""
        with self._lock:
            if step != self._key[0]:
                return
            self._requests += len(queue_seconds)
            for waited in queue_seconds:
                self._latencies[place_of(waited + compute_seconds)] += 1

    def request_failed(self, step: int) -> None:
        """The computation of a request failed."""
        with self._lock:
            self._errors += step == self._key[0]

    def rejected(self, reason: str) -> None:
        """A request was refused or dropped."""
        if reason in _ERRORS:
            with self._lock:
                self._errors += 1

    def read(self, step: int | None, digest: str) -> Traffic | None:
        """Return the counts of a version; None if they are of another one."""
        with self._lock:
            if self._key != (step, digest):
                return None
            return Traffic(requests=self._requests, errors=self._errors, latencies=tuple(trimmed(self._latencies)))


def encode_traffic(traffic: Traffic) -> fleet_pb2.ServedTraffic:
    """Return a message."""
    return fleet_pb2.ServedTraffic(requests=traffic.requests, errors=traffic.errors, latency_counts=traffic.latencies)


def decode_traffic(message: fleet_pb2.ServedTraffic) -> Traffic:
    """Return what a server sent, as far as it makes sense: it may send anything."""
    return Traffic(
        requests=max(0, message.requests),
        errors=max(0, message.errors),
        latencies=tuple(max(0, count) for count in message.latency_counts[:_LONGEST]),
    )


def encode_counts(counts: ShadowCounts) -> fleet_pb2.ShadowCounts:
    """Return a message; sums of what servers sent may be larger than it holds."""
    values: dict[str, Any] = {
        name: value if isinstance(value, float) else min(value, _MOST) for name, value in asdict(counts).items()
    }
    return fleet_pb2.ShadowCounts(**values)


def encode_shadow(report: ShadowReport) -> fleet_pb2.ShadowReport:
    """Return a message."""
    return fleet_pb2.ShadowReport(
        step=report.step,
        digest=report.digest,
        loaded=report.loaded,
        reason=report.reason,
        counts=encode_counts(report.counts),
    )


def decode_shadow(message: fleet_pb2.ShadowReport) -> ShadowReport:
    """Return what a server sent, as far as it makes sense: it may send anything."""
    counts = {field.name: getattr(message.counts, field.name) for field in message.counts.DESCRIPTOR.fields}
    return ShadowReport(
        step=message.step,
        digest=message.digest,
        loaded=message.loaded,
        reason=message.reason,
        counts=shadow_counts(counts),
    )
