"""What comes of computing requests once more with a new version, and whether it speaks against that version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

from understudy.evaluator.rollout_plan import LEAST_COMPARED, ShadowPlan
from understudy.evaluator.serving.rollout_health import wilson

MOST_FAILING: Final = 0.001
"""The share of failed or not finite answers beyond which, with confidence, a version is taken back."""


@dataclass(frozen=True, kw_only=True)
class ShadowCounts:
    """What came of the requests that one or more servers computed once more.

    Attributes:
        compared: The requests whose answers were compared.
        disagreeing: The sum of the shares of their examples that differ, so one for a request that differs as a whole.
        not_finite: Those of them with numbers that are not finite, and are in the serving version's answer.
        errors: The requests that failed, although the serving version answered them; they are not compared.
        dropped: The requests of the sample that were not computed, as the devices were busy or memory was short.
        largest_difference: The largest difference of two numbers, relative to the largest number of the output.
        seconds: What requests took that both versions computed alone, one after the other.
        serving_seconds: What the same requests took the serving version.
    """

    compared: int = 0
    disagreeing: float = 0.0
    not_finite: int = 0
    errors: int = 0
    dropped: int = 0
    largest_difference: float = 0.0
    seconds: float = 0.0
    serving_seconds: float = 0.0

    def plus(self, other: ShadowCounts) -> ShadowCounts:
        """Return the sum."""
        return self._with(other, 1)

    def since(self, earlier: ShadowCounts) -> ShadowCounts:
        """Return what came after an earlier reading; all of it if the counts began anew since."""
        gone = self._with(earlier, -1)
        return self if min(asdict(gone).values()) < 0 else gone

    def _with(self, other: ShadowCounts, sign: int) -> ShadowCounts:
        sums = {name: value + sign * getattr(other, name) for name, value in asdict(self).items()}
        return ShadowCounts(**{**sums, "largest_difference": max(self.largest_difference, other.largest_difference)})

    @property
    def failing(self) -> int:
        """The requests that failed, or whose answers are not finite."""
        return self.errors + self.not_finite

    @property
    def disagreement(self) -> float:
        """The mean share of the examples of a request that differ; NaN without any."""
        return self.disagreeing / self.compared if self.compared else math.nan

    @property
    def latency_ratio(self) -> float:
        """How many times as long as the serving version it takes; NaN if that was not measured."""
        return self.seconds / self.serving_seconds if self.serving_seconds > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class ShadowReport:
    """A server's report of a version that computes requests once more.

    Attributes:
        step: Its step.
        digest: The digest of its checkpoint.
        loaded: Whether the server has it loaded.
        reason: Why it cannot be loaded; empty if it is, or is about to be.
        counts: What came of the requests so far.
    """

    step: int
    digest: str
    loaded: bool
    reason: str
    counts: ShadowCounts


class ShadowTally:
    """Adds up what servers report. For one thread.

    Servers count on while the evaluator is away, and from zero when they begin.

    Args:
        saved: What was counted before a restart.
        last: The last reading of each server that is in it; None if they are not known: then each counts from its
            first report on.

    Attributes:
        total: What was counted.
        last: The last reading of each server.
    """

    def __init__(
        self, saved: ShadowCounts | None = None, last: Mapping[str, ShadowCounts] | None = MappingProxyType({})
    ) -> None:
        self._is_known = last is not None
        self.last = {} if last is None else dict(last)
        self.total = saved or ShadowCounts()

    def add(self, name: str, reading: ShadowCounts) -> None:
        """Add what a server counted since its last reading."""
        last = self.last.get(name)
        if last is not None or self._is_known:
            self.total = self.total.plus(reading.since(last or ShadowCounts()))
        self.last[name] = reading


def shadow_complaint(counts: ShadowCounts, plan: ShadowPlan) -> str:
    """Return why a version is taken back; empty if it is not, or if that is not known yet.

    Shares are judged by their Wilson intervals at 99%, with each request as one draw. A request of several examples
    differs by a share of them, which varies less than a draw that differs as a whole or not at all.
    """
    asked = counts.compared + counts.errors
    if asked >= LEAST_COMPARED and wilson(counts.failing, asked)[0] > MOST_FAILING:
        return (
            f"of {asked} requests that the serving version answered, {counts.errors} failed, and {counts.not_finite} "
            "answers are not finite"
        )
    if plan.most_disagreement is None or counts.compared < LEAST_COMPARED:
        return ""
    low, high = wilson(counts.disagreeing, counts.compared)
    if low <= plan.most_disagreement:
        return ""
    return (
        f"{counts.disagreement:.2%} of the answers to {counts.compared} requests differ ({low:.2%} to {high:.2%} at "
        f"99%), and at most {plan.most_disagreement:.2%} may"
    )


def shadow_numbers(counts: ShadowCounts) -> dict[str, float]:
    """Return the numbers for the ledger."""
    return {
        "compared_requests": counts.compared,
        "disagreement": counts.disagreement,
        "failed_requests": counts.errors,
        "not_finite_answers": counts.not_finite,
        "dropped_requests": counts.dropped,
        "largest_difference": counts.largest_difference,
        "latency_ratio": counts.latency_ratio,
    }


def shadow_counts(values: Mapping[str, Any]) -> ShadowCounts:
    """Return counts that anyone may have sent or written, as far as they make sense."""
    found: dict[str, Any] = {}
    for name, none in asdict(ShadowCounts()).items():
        value = type(none)(values.get(name, none))
        found[name] = none if math.isnan(value) else max(value, none)
    found["disagreeing"] = min(found["disagreeing"], float(found["compared"]))
    found["not_finite"] = min(found["not_finite"], found["compared"])
    return ShadowCounts(**found)
