"""What every call has, whatever its transport: a context, an id and a line in the access log."""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import structlog

from understudy.service.calls.status import Code


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


REQUEST_ID_HEADER = "x-request-id"
"""The metadata key of the id, in requests and responses."""

_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count(1)
_ACCEPTABLE = re.compile(r"[!-~]{1,128}")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current task's call; empty outside of calls."""


def accept_id(candidate: str | bytes | None) -> str:
    """Return the caller's id if it is 1 to 128 printable ASCII characters, else a new one of 32 hexadecimal digits."""
    if isinstance(candidate, str) and _ACCEPTABLE.fullmatch(candidate):
        return candidate
    return f"{_PROCESS}{next(_NUMBERS):016x}"


_log = structlog.get_logger(__name__)
_threshold: Final = logging.getLogger(__name__)
"""Checks whether a line would be written, at a tenth of the cost."""


def call_ended(path: str, code: Code, *, message: str, seconds: float) -> None:
    """Log a call: at debug if it succeeded, since there may be thousands a second, else at info."""
    if code is Code.OK and not _threshold.isEnabledFor(logging.DEBUG):
        return
    log = _log.debug if code is Code.OK else _log.info
    log("call ended", method=path, code=code.name, message=message, seconds=seconds)
