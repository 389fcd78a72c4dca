"""Searches settings by turns: a candidate and the best so far are measured one after the other, until it is clear."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE

MIN_GAIN = 1.03
"""Less than this is not worth a setting."""

LEAST_TURNS, MOST_TURNS = 4, 12

_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Of Student's t distribution at 0.975, by degrees of freedom from 1 up to `MOST_TURNS` - 1."""

Options = Mapping[str, int | float]
"""Settings by their names in a settings file."""

Outcome = Literal["taken", "no gain", "too slow", "other scores", "failed", "out of time"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one server did in one turn."""

    requests_per_second: float
    p99_ms: float


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Requests per second of a candidate over those of the best so far, with its interval at 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one candidate.

    Attributes:
        changed: The setting that is tried.
        value: Its value.
        outcome: What was decided.
        ratio: How it compares with the best so far; None if it was not measured.
        p99_ms: The median of its turns' 99th percentiles; NaN if it was not measured.
        turns: How many turns each had.
        note: Why, in words.
    """

    changed: str
    value: int | float
    outcome: Outcome
    ratio: Ratio | None = None
    p99_ms: float = math.nan
    turns: int = 0
    note: str = ""


@dataclass(kw_only=True)
class Search:
    """The result so far.

    Attributes:
        best: The settings that were taken.
        trials: Everything that was tried, in order.
    """

    best: dict[str, int | float] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        """Record a trial, and take its setting if that was decided."""
        self.trials.append(trial)
        if trial.outcome == "taken":
            self.best[trial.changed] = trial.value


def candidates(cores: int, *, examples_in_flight: int) -> Iterator[tuple[str, int | float]]:
    """Yield settings to try, each on top of what was taken before.

    Args:
        cores: The cores of this machine.
        examples_in_flight: No batch gets larger, so a limit that is not below that can gain nothing but by chance.
    """
    yield from (("intra_op_threads", 1 << power) for power in range(cores.bit_length()))
    if cores > 1:
        yield ("concurrent_batches", 2)
    yield ("inter_op_threads", 1)
    usual = min(DEFAULT_MAX_BATCH_SIZE, examples_in_flight)
    yield from (("max_batch_size", size) for size in (64, 1024) if min(size, examples_in_flight) != usual)
    yield from (("max_batch_delay_ms", delay) for delay in (1.0, 3.0))


def ratio_of(logs: Sequence[float]) -> Ratio:
    """Return the geometric mean of ratios, with its interval, from the logarithms of the turns; at least two."""
    mean = statistics.fmean(logs)
    spread = _QUANTILES[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), low=math.exp(mean - spread), high=math.exp(mean + spread))


def compare(
    changed: str,
    value: float,
    *,
    candidate: Callable[[], Turn],
    best: Callable[[], Turn],
    max_p99_ms: float | None,
    has_time: Callable[[], bool],
) -> Trial:
    """Measure a candidate and the best so far by turns until it is clear which answers more, or time runs out.

    Args:
        changed: The setting that is tried.
        value: Its value.
        candidate: Measures the candidate.
        best: Measures the best so far.
        max_p99_ms: The highest 99th percentile of the latency, in milliseconds; None for none.
        has_time: Whether there is time for another turn.
    """
    logs: list[float] = []
    p99s: list[float] = []
    while len(logs) < MOST_TURNS and has_time():
        pair = (candidate(), best()) if len(logs) % 2 else (best(), candidate())[::-1]
        logs.append(math.log(pair[0].requests_per_second / pair[1].requests_per_second))
        p99s.append(pair[0].p99_ms)
        if len(logs) >= LEAST_TURNS and (decided := _decided(ratio_of(logs))) is not None:
            break
    else:
        decided = None
    if len(logs) < LEAST_TURNS:
        return Trial(
            changed=changed, value=value, outcome="out of time", turns=len(logs), note="too few turns to decide"
        )
    ratio, p99_ms = ratio_of(logs), statistics.median(p99s)
    outcome: Outcome = "taken" if decided else "no gain"
    note = "" if decided is not None else "not clear after all turns"
    if max_p99_ms is not None and p99_ms > max_p99_ms:
        outcome, note = "too slow", f"the limit is {max_p99_ms:g} ms"
    return Trial(changed=changed, value=value, outcome=outcome, ratio=ratio, p99_ms=p99_ms, turns=len(logs), note=note)


def _decided(ratio: Ratio) -> bool | None:
    """Return whether a candidate is better, or None if that is not clear yet."""
    if ratio.low > 1.0 and ratio.value >= MIN_GAIN:
        return True
    return False if ratio.high < MIN_GAIN else None


def scores_differ(found: Mapping[str, Mapping[str, float]], usual: Mapping[str, Mapping[str, float]]) -> str:
    """Return which score differs by more than 1e-6 of its size (or of 1, if it is smaller); empty if none does."""
    for dataset, metrics in usual.items():
        for name, value in metrics.items():
            other = found[dataset][name]
            if not math.isclose(other, value, rel_tol=1e-6, abs_tol=1e-6) and not math.isnan(other) & math.isnan(value):
                return f"{dataset}/{name} is {other!r} instead of {value!r}"
    return ""


def whisker(ratio: Ratio, *, width: int = 31, widest: float = 2.0) -> str:
    """Return a plot of a ratio on one line: its interval, the ratio itself, and 1 in the middle of the scale."""

    def place(value: float) -> int:
        share = math.log(min(max(value, 1 / widest), widest)) / math.log(widest)
        return round((share + 1) / 2 * (width - 1))

    cells = [" "] * width
    cells[width // 2] = "|"
    for position in range(place(ratio.low), place(ratio.high) + 1):
        cells[position] = "-"
    cells[place(ratio.value)] = "o"
    return "".join(cells)
