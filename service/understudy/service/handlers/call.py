"""What the handlers know about the call they answer."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CallContext:
    """The circumstances of one call. That the caller has gone reaches the handlers as asyncio's cancellation.

    Attributes:
        deadline: When the caller stops waiting, on `time.monotonic`'s clock in seconds; None if never.
    """

    deadline: float | None

    @classmethod
    def with_time_remaining(cls, seconds: float | None) -> CallContext:
        """Return the context of a call whose caller waits this long from now; None is for ever."""
        return cls(deadline=None if seconds is None else time.monotonic() + seconds)
