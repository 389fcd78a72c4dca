"""Whether the servers that serve a new version do clearly worse than the others."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from understudy.evaluator.serving.shadow_health import ShadowReport

LATENCY_BOUNDS_SECONDS: Final = tuple(0.0001 * 2.0 ** (place / 2) for place in range(41))
"""The upper bounds of the latencies that are counted together; each is the root of 2 times the one before."""

LEAST_REQUESTS: Final = 20
"""With fewer requests of the new version, neither errors nor latencies decide."""

LEAST_SLOW_SECONDS: Final = 0.01
"""A request that takes no longer is never slow."""

_TWICE: Final = 2
"""Twice a latency is this many bounds further."""

_ONE_IN_A_HUNDRED: Final = 0.01
_MARGIN: Final = 0.01
"""By how much the share of errors must be greater, besides being so with confidence."""

_UNKNOWN_ERRORS: Final = 0.5
"""The share of errors to exceed where the other servers have too few requests to compare with."""

_Z: Final = 2.576
"""The normal quantile of intervals at 99%."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one or more servers answered with one version.

    Attributes:
        requests: The Predict requests that were computed.
        errors: The requests that failed, or were refused for the queue, a deadline or their inputs.
        latencies: The computed requests by `LATENCY_BOUNDS_SECONDS`, and those beyond; zeros at the end may lack.
    """

    requests: int = 0
    errors: int = 0
    latencies: tuple[int, ...] = ()

    def plus(self, other: Traffic, sign: int = 1) -> Traffic:
        """Return the sum, or with the sign -1 the difference."""
        pairs = zip_longest(self.latencies, other.latencies, fillvalue=0)
        return Traffic(
            requests=self.requests + sign * other.requests,
            errors=self.errors + sign * other.errors,
            latencies=tuple(own + sign * its for own, its in pairs),
        )

    def since(self, earlier: Traffic) -> Traffic:
        """Return what came after an earlier reading; all of it if the counts began anew since."""
        gone = self.plus(earlier, -1)
        return self if min(gone.requests, gone.errors, *gone.latencies, 0) < 0 else gone

    @property
    def total(self) -> int:
        """The requests, with the errors."""
        return self.requests + self.errors

    @property
    def p99_place(self) -> int | None:
        """The place of the bound that 99 in 100 computed requests do not exceed; None without any."""
        wanted, seen = math.ceil(0.99 * sum(self.latencies)), 0
        for place, count in enumerate(self.latencies):
            seen += count
            if seen >= wanted > 0:
                return place
        return None

    @property
    def p99_seconds(self) -> float:
        """That bound; infinite beyond the last one, NaN without any."""
        place = self.p99_place
        return math.nan if place is None else _bound(place)


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """A connected server that follows this evaluator.

    Attributes:
        name: Its name.
        key: The step and digest of the checkpoint that it serves; None before the first.
        reason: Why it does not serve what was decided for it; empty if it does, or is about to.
        traffic: What it answered with that checkpoint; None if it did not say.
        shadow: What came of the requests that it computed once more with a new version; None if it did not say.
    """

    name: str
    key: tuple[int | None, str]
    reason: str
    traffic: Traffic | None = None
    shadow: ShadowReport | None = None


class Tally:
    """Adds up what servers report, each from its first report on or from zero. For one thread."""

    def __init__(self) -> None:
        self._last: dict[str, Traffic] = {}
        self.total = Traffic()

    def add(self, name: str, reading: Traffic, *, from_zero: bool) -> None:
        """Add what a server answered since its last reading; its first one counts only if it counts from zero."""
        last = self._last.get(name)
        if last is not None or from_zero:
            self.total = self.total.plus(reading.since(last or Traffic()))
        self._last[name] = reading


def place_of(seconds: float) -> int:
    """Return the place of a latency in `Traffic.latencies`."""
    return bisect.bisect_left(LATENCY_BOUNDS_SECONDS, seconds)


def complaint(part: Traffic, others: Traffic) -> str:
    """Return why the servers of the part do clearly worse; empty if they do not, or if that is not known yet.

    Shares are compared by their Wilson intervals at 99%, so that few requests decide only what is plain.
    """
    return _more_errors(part, others) or _slower(part, others)


def _more_errors(part: Traffic, others: Traffic) -> str:
    if part.total < LEAST_REQUESTS:
        return ""
    low, _ = wilson(part.errors, part.total)
    limit = _UNKNOWN_ERRORS
    if others.total >= LEAST_REQUESTS:
        _, high = wilson(others.errors, others.total)
        limit = max(high, others.errors / others.total + _MARGIN)
    if low <= limit:
        return ""
    return f"{part.errors} of its {part.total} requests failed, and {others.errors} of {others.total} at the others"


def _slower(part: Traffic, others: Traffic) -> str:
    place = others.p99_place
    if part.requests < LEAST_REQUESTS or others.requests < LEAST_REQUESTS or place is None:
        return ""
    limit = max(place + _TWICE, place_of(LEAST_SLOW_SECONDS))
    slow = sum(part.latencies[limit + 1 :])
    low, _ = wilson(slow, part.requests)
    if low <= _ONE_IN_A_HUNDRED:
        return ""
    return (
        f"{slow} of its {part.requests} requests took longer than {_bound(limit):.3g} s; 99 in 100 of the others' "
        f"{others.requests} took at most {_bound(place):.3g} s"
    )


def wilson(count: float, of: int) -> tuple[float, float]:
    """Return the bounds of the Wilson score interval of a share at 99%."""
    share, spread = count / of, _Z * _Z / of
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / of + spread / of / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def _bound(place: int) -> float:
    return LATENCY_BOUNDS_SECONDS[place] if place < len(LATENCY_BOUNDS_SECONDS) else math.inf


def trimmed(counts: Iterable[int]) -> Sequence[int]:
    """Return counts without the zeros at their end."""
    found = list(counts)
    while found and not found[-1]:
        found.pop()
    return found
