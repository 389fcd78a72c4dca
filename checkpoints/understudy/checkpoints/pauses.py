"""Pauses between attempts that fail."""

from __future__ import annotations

_MOST_DOUBLINGS = 64


def doubling_pause(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait: ``first``, doubled ``failures`` times, but at most ``longest``.

    Any number of failures is fine; ``2.0**failures`` would overflow beyond 1,023.
    """
    return min(first * 2.0 ** min(failures, _MOST_DOUBLINGS), longest)
