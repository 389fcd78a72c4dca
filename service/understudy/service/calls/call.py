"""One call, as a transport passes it to the service."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

from understudy.service.calls.status import Failure

REQUEST_ID_HEADER: Final = "x-request-id"
"""The metadata key of the id that links a call's log lines to the caller's logs, in requests and responses."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current task's call; empty outside of calls."""

_PROCESS: Final = secrets.token_hex(8)
_NUMBERS: Final = itertools.count(1)
_ACCEPTABLE: Final = re.compile(r"[!-~]{1,128}")


def accept_id(candidate: str | bytes | None) -> str:
    """Return the caller's id if it is 1 to 128 printable ASCII characters, else a new one of 32 hexadecimal digits."""
    if isinstance(candidate, str) and _ACCEPTABLE.fullmatch(candidate):
        return candidate
    return f"{_PROCESS}{next(_NUMBERS):016x}"


class CallContext:
    """The context of one call, for its handler. A disconnect of the caller cancels the handler's asyncio task.

    Attributes:
        audited: What the call decides, as fields of the audit log, which its handler sets; None if nothing.
        deadline: When the caller stops waiting, on `time.monotonic`'s clock in seconds; None if never.
    """

    __slots__ = ("audited", "deadline")

    audited: Mapping[str, Any] | None

    def __init__(self, *, deadline: float | None) -> None:
        self.audited = None
        self.deadline = deadline


class Call(CallContext, ABC):
    """One call of one method. A transport implements it, and `ServedMethod.serve` drives it, in one task.

    Attributes:
        has_callers_id: Whether the caller sent the id; then every response carries it.
        received_bytes: The size of the request messages so far, decompressed.
        request_id: The id of the call.
        started: When it began, on `time.monotonic`'s clock in seconds.
    """

    __slots__ = ("has_callers_id", "received_bytes", "request_id", "started")

    def __init__(self) -> None:  # sets what `CallContext` would, as each function costs every call
        self.audited = None
        self.deadline = None
        self.started = time.monotonic()
        self.received_bytes = 0
        came = self.header(REQUEST_ID_HEADER)
        self.has_callers_id = came is not None
        self.request_id = accept_id(came)

    @property
    @abstractmethod
    def peer(self) -> str:
        """The address of the caller, as the transport writes it."""

    @abstractmethod
    def header(self, name: str) -> str | bytes | None:
        """Return the value of a metadata key or header that the caller sent, by its name in lower case."""

    @abstractmethod
    def open(self) -> None:
        """Set the deadline, and begin to enforce it.

        Raises:
            InvalidInputError: The caller's timeout is malformed.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop enforcing the deadline. The task is not cancelled from now on."""

    @abstractmethod
    def why_cancelled(self) -> Failure:
        """Return why the task was cancelled; raise CancelledError if it was not to end the call."""

    @abstractmethod
    async def fail(self, failure: Failure) -> None:
        """Send a failure to the caller, if it is still there."""
