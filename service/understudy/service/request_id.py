"""The id that links a call's log lines to the caller's logs."""

from __future__ import annotations

import itertools
import re
import secrets
from contextvars import ContextVar

HEADER = "x-request-id"
"""The metadata key of the id, in requests and responses."""

_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count(1)
_ACCEPTABLE = re.compile(r"[!-~]{1,128}")

current: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current task's call; empty outside of calls."""


def accept(candidate: str | bytes | None) -> str:
    """Return the caller's id if it is 1 to 128 printable ASCII characters, else a new one of 32 hexadecimal digits."""
    if isinstance(candidate, str) and _ACCEPTABLE.fullmatch(candidate):
        return candidate
    return f"{_PROCESS}{next(_NUMBERS):016x}"
