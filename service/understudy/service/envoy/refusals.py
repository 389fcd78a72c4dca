"""What this front end refuses before or after the handlers have a say.

CallEndedError                    how a call ends is decided already
└── MessageTooLargeError          a message is larger than a message may be
CallerGoneError                   there is nobody left to answer
"""

from __future__ import annotations

from typing import Literal

from understudy.service.handlers.codes import Code
from understudy.service.handlers.failures import Failure


class CallEndedError(Exception):
    """How a call ends is decided already.

    Args:
        code: The status.
        message: A sentence for the caller.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(code=code, message=message)


class MessageTooLargeError(CallEndedError):
    """A message is larger than a message may be.

    Args:
        way: Which way it went; the text is grpc's own, which clients look for.
        length: Its length in bytes.
        max_bytes: The largest there may be.
    """

    def __init__(self, way: Literal["Received", "Sent"], length: int, max_bytes: int) -> None:
        super().__init__(Code.RESOURCE_EXHAUSTED, f"{way} message larger than max ({length} vs. {max_bytes})")


class CallerGoneError(Exception):
    """There is nobody left to answer."""
