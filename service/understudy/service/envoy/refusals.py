"""Errors of this front end itself, before or after the handlers.

CallEndedError                    the call already has a status
└── MessageTooLargeError          a message exceeds the size limit
CallerGoneError                   the caller has disconnected
"""

from __future__ import annotations

from typing import Literal

from understudy.service.handlers.codes import Code
from understudy.service.handlers.failures import Failure


class CallEndedError(Exception):
    """The call already has a status.

    Args:
        code: The status.
        message: A sentence for the caller.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(code=code, message=message)


class MessageTooLargeError(CallEndedError):
    """A message exceeds the size limit.

    Args:
        way: The direction; the text is grpc's own, which clients parse.
        length: Its length in bytes.
        max_bytes: The limit in bytes.
    """

    def __init__(self, way: Literal["Received", "Sent"], length: int, max_bytes: int) -> None:
        super().__init__(Code.RESOURCE_EXHAUSTED, f"{way} message larger than max ({length} vs. {max_bytes})")


class CallerGoneError(Exception):
    """The caller has disconnected."""
