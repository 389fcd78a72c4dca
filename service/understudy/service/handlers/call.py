"""The transport-independent context of a call."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CallContext:
    """The context of one call. A disconnect of the caller cancels the handler's asyncio task.

    Attributes:
        deadline: When the caller stops waiting, on `time.monotonic`'s clock in seconds; None if never.
    """

    deadline: float | None

    @classmethod
    def with_time_remaining(cls, seconds: float | None) -> CallContext:
        """Return the context of a call whose deadline is this many seconds from now; None for no deadline."""
        return cls(deadline=None if seconds is None else time.monotonic() + seconds)
