"""A line about every call."""

from __future__ import annotations

import structlog

from understudy.service.dataplane.codes import Code

_log = structlog.get_logger(__name__)


def call_ended(path: str, code: Code, *, message: str, seconds: float) -> None:
    """Write the line: at level debug if the call ended well, since there may be thousands a second, else at info."""
    log = _log.debug if code is Code.OK else _log.info
    log("call ended", method=path, code=code.name, message=message, seconds=seconds)
