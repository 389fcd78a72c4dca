"""How new versions are rolled out to the servers that follow, from the words of the setting."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from understudy.evaluator.evaluator_errors import ConfigurationError

LONGEST_SECONDS: Final = 7 * 86400.0
LEAST_FOLLOWERS: Final = 2
"""With fewer servers there is no part and others."""

LEAST_COMPARED: Final = 20
"""With fewer compared requests, nothing speaks for or against a version."""

_FORM: Final = (
    "canary=SHARE%,after=TIME, such as canary=10%,after=15m, or shadow=SHARE%,after=TIME, such as "
    "shadow=5%,after=15m,requests=100,disagreement=2%,tolerance=1%"
)
_SHARE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")
_TIME: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)")
_COUNT: Final = re.compile(r"[0-9]{1,9}")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class CanaryPlan:
    """A part of the servers serves a new version first, for a time.

    Attributes:
        share: The share of the servers, more than 0 and less than 1.
        after_seconds: How long they serve it before all do.
    """

    share: float
    after_seconds: float

    def part_of(self, names: Collection[str]) -> tuple[str, ...]:
        """Return which of these servers serve a new version first: one at least, and never all.

        The choice depends only on the names, so it is the same for the next version. There are two names or more.
        """
        count = min(len(names) - 1, max(1, int(self.share * len(names) + 0.5)))
        ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        return tuple(sorted(ranked[:count]))


@dataclass(frozen=True, kw_only=True)
class ShadowPlan:
    """A new version computes a part of the requests once more, for a time, before it answers any.

    Attributes:
        share: The share of the requests, more than 0 and at most 1.
        after_seconds: How long it does before all servers serve it.
        least_requests: How many requests it must have computed besides.
        most_disagreement: The share of the answers in which it may differ; None for no limit.
        tolerance: By how much numbers may differ, relative to the largest one of their output.
    """

    share: float
    after_seconds: float
    least_requests: int = 100
    most_disagreement: float | None = None
    tolerance: float = 0.01


RolloutPlan = CanaryPlan | ShadowPlan


def parse_rollout(text: str) -> RolloutPlan:
    """Return the plan that a setting says.

    Raises:
        ConfigurationError: It cannot be read, or a number is out of its range.
    """
    words: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name in words:
            raise ConfigurationError(f"rollout is {text!r}; give {_FORM}")
        words[name] = value
    seconds = _seconds(text, words.pop("after", "15m"))
    if words.keys() == {"canary"}:
        return CanaryPlan(share=_canary_share(text, words["canary"]), after_seconds=seconds)
    if "shadow" in words and words.keys() <= {"shadow", "requests", "disagreement", "tolerance"}:
        return _shadow(text, words, seconds)
    raise ConfigurationError(f"rollout is {text!r}; give {_FORM}")


def _seconds(text: str, value: str) -> float:
    after = _TIME.fullmatch(value)
    if after is None:
        raise ConfigurationError(f"rollout is {text!r}; give {_FORM}")
    seconds = float(after[1]) * _UNITS[after[2]]
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigurationError(f"rollout is {text!r}; give a time of more than 0 s and at most {LONGEST_SECONDS:g} s")
    return seconds


def _percent(text: str, value: str) -> float:
    share = _SHARE.fullmatch(value)
    if share is None:
        raise ConfigurationError(f"rollout is {text!r}; give {_FORM}")
    return float(share[1])


def _canary_share(text: str, value: str) -> float:
    percent = _percent(text, value)
    if percent <= 0:
        raise ConfigurationError(f"rollout is {text!r}: at 0% no server would serve the new version; give more, or 1%")
    if percent >= 100:  # noqa: PLR2004 - per cent
        raise ConfigurationError(
            f"rollout is {text!r}: at {value} no server would be left to compare with; give less, or no rollout, "
            "so that all servers serve a new version at once"
        )
    return percent / 100


def _shadow(text: str, words: Mapping[str, str], seconds: float) -> ShadowPlan:
    percent = _percent(text, words["shadow"])
    if not 0 < percent <= 100:  # noqa: PLR2004 - per cent
        raise ConfigurationError(f"rollout is {text!r}; give a share of the requests of more than 0% and at most 100%")
    requests = words.get("requests", str(ShadowPlan.least_requests))
    if _COUNT.fullmatch(requests) is None:
        raise ConfigurationError(f"rollout is {text!r}; give {_FORM}")
    if int(requests) < LEAST_COMPARED:
        raise ConfigurationError(
            f"rollout is {text!r}: {requests} requests are too few to compare versions; give {LEAST_COMPARED} or more"
        )
    limit = _percent(text, words["disagreement"]) if "disagreement" in words else None
    if limit is not None and limit >= 100:  # noqa: PLR2004 - per cent
        raise ConfigurationError(f"rollout is {text!r}: no version exceeds a disagreement of {limit:g}%; give less")
    return ShadowPlan(
        share=percent / 100,
        after_seconds=seconds,
        least_requests=int(requests),
        most_disagreement=None if limit is None else limit / 100,
        tolerance=_percent(text, words["tolerance"]) / 100 if "tolerance" in words else ShadowPlan.tolerance,
    )


def in_words(seconds: float) -> str:
    """Return a time as an operator writes it."""
    for unit, size in (("h", 3600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
