"""The id that ties a call's log lines to the caller's own."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

HEADER = "x-request-id"
"""The name of the metadata key that carries the id, both ways."""

_ACCEPTABLE = re.compile(r"[!-~]{1,128}")

current: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the call that this task works for; empty outside of calls."""


def accept(candidate: str | bytes | None) -> str:
    """Return the caller's id if it is 1 to 128 printable ASCII characters, else a new one."""
    if isinstance(candidate, str) and _ACCEPTABLE.fullmatch(candidate):
        return candidate
    return uuid.uuid4().hex
