"""The numbers of live traffic, from the same metrics that Prometheus scrapes.

Imports no other module, as `understudy top` reads the metrics of another machine where the service is not installed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

WINDOW_SECONDS: Final = 60.0
_APART_SECONDS: Final = 5.0

_PREDICTING: Final = frozenset({"Predict", "PredictStream", "ModelInfer", "ModelStreamInfer"})
_HANDLED: Final = "grpc_server_handled_total"
_DURATION: Final = "grpc_server_handling_seconds_bucket"
_BATCH: Final = "understudy_batch_examples_bucket"


class Sample(Protocol):
    """The value of one series, as `prometheus_client.samples.Sample`."""

    @property
    def name(self) -> str:
        """The name of the series."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""

    @property
    def value(self) -> float:
        """Its value."""


@dataclass(frozen=True, kw_only=True)
class LiveNumbers:
    """What the service does now.

    Attributes:
        window_seconds: The time that the rate, the failures and the percentiles are about; None since the start.
        requests: The predict calls that ended since the start, over all protocols.
        rate: Predict calls in a second; None if it is not known yet.
        failed: Predict calls of the time that did not succeed.
        p50_seconds: The median duration of a call, up to the width of a bucket; None without calls.
        p99_seconds: The 99th percentile.
        batch_p50: The median number of examples of a batch, up to the width of a bucket; None without batches.
        batch_p99: The 99th percentile.
        queue_examples: Examples that wait for a device.
        replicas: Replicas that a batch is split over.
        memory: Bytes in use now, by device.
    """

    window_seconds: float | None
    requests: int
    rate: float | None
    failed: int
    p50_seconds: float | None
    p99_seconds: float | None
    batch_p50: float | None
    batch_p99: float | None
    queue_examples: int
    replicas: int
    memory: Mapping[str, float]


@dataclass(kw_only=True)
class _Counts:
    """The counters at one time."""

    at: float
    succeeded: float = 0.0
    failed: float = 0.0
    durations: dict[float, float]
    batches: dict[float, float]

    def since(self, before: _Counts) -> _Counts:
        """Return what was counted after an earlier time."""
        return _Counts(
            at=self.at,
            succeeded=self.succeeded - before.succeeded,
            failed=self.failed - before.failed,
            durations=_since(self.durations, before.durations),
            batches=_since(self.batches, before.batches),
        )


def _since(buckets: Mapping[float, float], before: Mapping[float, float]) -> dict[float, float]:
    return {bound: count - before.get(bound, 0.0) for bound, count in buckets.items()}


class LiveReader:
    """Reads the numbers. Not thread-safe.

    Args:
        samples: Returns the values of all series.
        clock: Seconds.
    """

    def __init__(self, samples: Callable[[], Iterable[Sample]], clock: Callable[[], float] = time.monotonic) -> None:
        self._samples = samples
        self._clock = clock
        self._earlier: deque[_Counts] = deque()

    def read(self) -> LiveNumbers:
        """Return the current numbers. Blocks as a scrape does."""
        counts = _Counts(at=self._clock(), durations={}, batches={})
        gauges: dict[str, float] = {}
        memory: dict[str, float] = {}
        for sample in self._samples():
            if sample.name in (_HANDLED, _DURATION) and sample.labels["grpc_method"] in _PREDICTING:
                _count(counts, sample.name, sample.labels, sample.value)
            elif sample.name == _BATCH:
                counts.batches[float(sample.labels["le"])] = sample.value
            elif sample.name in ("understudy_queue_examples", "understudy_replicas"):
                gauges[sample.name] = sample.value
            elif sample.name == "understudy_device_memory_bytes" and sample.labels["kind"] == "current":
                memory[sample.labels["device"]] = sample.value
        before = self._before(counts)
        recent = counts if before is None else counts.since(before)
        seconds = None if before is None else counts.at - before.at
        return LiveNumbers(
            window_seconds=seconds,
            requests=int(counts.succeeded + counts.failed),
            rate=None if seconds is None else (recent.succeeded + recent.failed) / seconds,
            failed=int(recent.failed),
            p50_seconds=quantile(recent.durations, 0.5),
            p99_seconds=quantile(recent.durations, 0.99),
            batch_p50=quantile(recent.batches, 0.5),
            batch_p99=quantile(recent.batches, 0.99),
            queue_examples=int(gauges["understudy_queue_examples"]),
            replicas=int(gauges["understudy_replicas"]),
            memory=memory,
        )

    def _before(self, counts: _Counts) -> _Counts | None:
        """Return the oldest counts within the window, if any are old enough to compare with; keep the new ones.

        Counts that are less than the ones before them are of a server that has started again.
        """
        earlier = self._earlier
        if earlier and counts.succeeded + counts.failed < earlier[-1].succeeded + earlier[-1].failed:
            earlier.clear()
        while earlier and counts.at - earlier[0].at > WINDOW_SECONDS:
            earlier.popleft()
        before = earlier[0] if earlier and counts.at - earlier[0].at >= _APART_SECONDS else None
        if not earlier or counts.at - earlier[-1].at >= _APART_SECONDS:
            earlier.append(counts)
        return before


def _count(counts: _Counts, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == _DURATION:
        bound = float(labels["le"])
        counts.durations[bound] = counts.durations.get(bound, 0.0) + value
    elif labels["grpc_code"] == "OK":
        counts.succeeded += value
    else:
        counts.failed += value


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of a histogram, linear within its bucket, as PromQL's ``histogram_quantile``.

    Args:
        buckets: The number of values up to each bound; the largest bound is infinite.
        share: Which quantile, from 0 to 1.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank = share * buckets[bounds[-1]]
    below, lower = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank:
            if math.isinf(bound):
                return lower
            inside = count - below
            return lower if inside <= 0 else lower + (bound - lower) * (rank - below) / inside
        below, lower = count, bound
    return lower
