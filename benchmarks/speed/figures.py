"""The figures of one measurement, the summary of several, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from benchmarks.speed.processes import Usage


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One measurement.

    Attributes:
        requests_per_second: Answered requests.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latency.
        cpu_seconds_per_1000: CPU time of the server's processes per thousand requests.
        rss_mib: Resident memory of the server's processes at the end.
    """

    requests_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_seconds_per_1000: float
    rss_mib: float

    @classmethod
    def of(cls, latencies_ms: npt.ArrayLike, *, seconds: float, answered: int, used: Usage) -> Self:
        """Return the figures of a measurement. Where nothing was answered, the latencies are its whole time.

        Args:
            latencies_ms: Of the requests that count.
            seconds: The time in which those were answered.
            answered: Requests that used the CPU time, including the warm-up.
            used: What the server's processes used meanwhile.
        """
        latencies = np.asarray(latencies_ms, np.float64)
        p50, p99 = np.percentile(latencies, (50, 99)) if len(latencies) else (1000 * seconds, 1000 * seconds)
        return cls(
            requests_per_second=round(len(latencies) / seconds, 1),
            p50_ms=round(float(p50), 3),
            p99_ms=round(float(p99), 3),
            cpu_seconds_per_1000=round(1000 * used.cpu_seconds / max(1, answered), 4),
            rss_mib=round(used.rss_mib, 1),
        )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of several measurements, with the minimum and maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def as_json(self) -> dict[str, Any]:
        """Return it in the format of results."""
        return {"median": round(self.median, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


def percentiles(milliseconds: Sequence[float], **percents: float) -> dict[str, float]:
    """Return percentiles of latencies, by the names given to them; NaN for no values."""
    found = np.percentile(milliseconds, [*percents.values()]) if milliseconds else [float("nan")] * len(percents)
    return {name: round(float(value), 3) for name, value in zip(percents, found, strict=True)}


def spread_of_ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the ratio of two medians, with the minimum and maximum of the ratios within one round."""
    ratios = [one / other for one, other in zip(above, below, strict=False)]
    return Spread(median=statistics.median(above) / statistics.median(below), low=min(ratios), high=max(ratios))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None) -> str:
    """Return a number with three significant digits; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(value: Spread) -> str:
    """Return a median with the range over the rounds."""
    if value.low == value.high:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"
