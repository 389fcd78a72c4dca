"""How new versions are rolled out to the servers that follow, from the words of the setting."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from understudy.evaluator.evaluator_errors import ConfigurationError

LONGEST_SECONDS: Final = 7 * 86400.0
LEAST_FOLLOWERS: Final = 2
"""With fewer servers there is no part and others."""

_FORM: Final = "canary=SHARE%,after=TIME, such as canary=10%,after=15m"
_SHARE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")
_TIME: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
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


def parse_rollout(text: str) -> RolloutPlan:
    """Return the plan that a setting says.

    Raises:
        ConfigurationError: It cannot be read, or a number is out of its range.
    """
    words: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name not in ("canary", "after") or name in words:
            raise ConfigurationError(f"rollout is {text!r}; give {_FORM}")
        words[name] = value
    share, after = _SHARE.fullmatch(words.get("canary", "")), _TIME.fullmatch(words.get("after", "15m"))
    if share is None or after is None:
        raise ConfigurationError(f"rollout is {text!r}; give {_FORM}")
    percent = float(share[1])
    if percent <= 0:
        raise ConfigurationError(f"rollout is {text!r}: at 0% no server would serve the new version; give more, or 1%")
    if percent >= 100:  # noqa: PLR2004 - per cent
        raise ConfigurationError(
            f"rollout is {text!r}: at {share[0]} no server would be left to compare with; give less, or no rollout, "
            "so that all servers serve a new version at once"
        )
    seconds = float(after[1]) * _UNITS[after[2]]
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigurationError(f"rollout is {text!r}; give a time of more than 0 s and at most {LONGEST_SECONDS:g} s")
    return RolloutPlan(share=percent / 100, after_seconds=seconds)


def in_words(seconds: float) -> str:
    """Return a time as an operator writes it."""
    for unit, size in (("h", 3600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
