"""The access log: one line per call."""

from __future__ import annotations

import logging
from typing import Final

import structlog

from understudy.service.handlers.codes import Code

_log = structlog.get_logger(__name__)
_threshold: Final = logging.getLogger(__name__)
"""Checks whether a line would be written, at a tenth of the cost."""


def call_ended(path: str, code: Code, *, message: str, seconds: float) -> None:
    """Log a call: at debug if it succeeded, since there may be thousands a second, else at info."""
    if code is Code.OK and not _threshold.isEnabledFor(logging.DEBUG):
        return
    log = _log.debug if code is Code.OK else _log.info
    log("call ended", method=path, code=code.name, message=message, seconds=seconds)
