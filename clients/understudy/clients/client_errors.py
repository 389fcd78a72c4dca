"""The errors of calls.

UnderstudyError
├── InvalidArgumentError       the data or a parameter is invalid; the text names the value and what was expected
├── NotFoundError              there is no such model, version, dataset or service; the text lists the existing ones
├── UnauthenticatedError       the credentials of the call are missing or invalid
├── PermissionDeniedError      the caller may not do this
├── FailedPreconditionError    the server is not in a state to do this, such as scoring a model without a loss
├── UnavailableError           no server responds, has a model yet, or accepts calls; retries have failed
├── OverloadedError            a queue is full; carries the time to wait before a retry
├── MessageTooLargeError       a message exceeds the limit of one side
├── DeadlineExceededError      the deadline has passed
├── CancelledError             the call was cancelled
├── AbortedError               the server ended a stream, such as one that was idle for too long
├── UnimplementedError         the server does not support this call
└── InternalError              a defect of the server; carries the id of its log entry

Any other status of gRPC is a plain UnderstudyError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc

if TYPE_CHECKING:
    from google.rpc.status_pb2 import Status

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_WHERE_TO_GIVE_ONE = "(token_file= of the clients, --token-file of the commands)"
_INCIDENT = re.compile(r"\b[0-9a-f]{32}\b")
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class UnderstudyError(Exception):
    """The base class of the clients' exceptions.

    Args:
        message: What happened, for people.
        code: The gRPC status, if a server or gRPC itself returned one.
    """

    def __init__(self, message: str, *, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        super().__init__(message)
        self.code = code


class InvalidArgumentError(UnderstudyError):
    """The data or a parameter is invalid. The text names it, the value and what was expected."""


class NotFoundError(UnderstudyError):
    """There is no such model, version, dataset or service. The text lists the existing ones."""


class UnauthenticatedError(UnderstudyError):
    """The credentials of the call are missing or invalid, or the channel is not secure enough to send them."""


class PermissionDeniedError(UnderstudyError):
    """The caller may not do this."""


class FailedPreconditionError(UnderstudyError):
    """The server is not in a state to do this. The text says what is missing."""


class UnavailableError(UnderstudyError):
    """No server responds, no server has a model yet, or it is draining. Calls that are safe to repeat were retried."""


class OverloadedError(UnderstudyError):
    """A queue of the server is full.

    Attributes:
        retry_after_seconds: How long to wait before a retry; None if the server did not say.
    """

    retry_after_seconds: float | None = None


class MessageTooLargeError(UnderstudyError):
    """A message exceeds the limit of one side. Send fewer examples at once, or raise that limit."""


class DeadlineExceededError(UnderstudyError):
    """The deadline has passed."""


class CancelledError(UnderstudyError):
    """The call was cancelled."""


class AbortedError(UnderstudyError):
    """The server aborted a stream."""


class UnimplementedError(UnderstudyError):
    """The server does not support this call."""


class InternalError(UnderstudyError):
    """A defect of the server.

    Attributes:
        incident: The id of the entry in the server's log; None if the server gave none.
    """

    incident: str | None = None


_BY_CODE: dict[grpc.StatusCode, type[UnderstudyError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.INTERNAL: InternalError,
}


_OTHER_VERSION = "the server and this client are of different versions"
_EXPLAINED = {
    "Method not found!": f"the server has no such call: {_OTHER_VERSION}, or it is another program",
    "Exception deserializing response!": f"the response cannot be read: {_OTHER_VERSION}; upgrade the older one",
}
"""What grpcio says, and what it means here."""


class _Status(Protocol):
    """The status of a call; the RpcErrors of grpc and of grpc.aio have it."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...


@contextmanager
def translated() -> Iterator[None]:
    """Raise the error of this module for an RpcError of grpcio."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error) from error


def client_closed() -> CancelledError:
    """Return the error of a call of a client that was closed before or meanwhile."""
    return CancelledError("the client was closed; create another one", code=grpc.StatusCode.CANCELLED)


def error_of(error: grpc.RpcError) -> UnderstudyError:
    """Return the typed error for an RpcError."""
    status = cast("_Status", error)
    details = _status_details(status.trailing_metadata() or ())
    retry_after = None if details is None else _retry_after_seconds(details)
    return error_from_status(status.code(), status.details() or "", retry_after_seconds=retry_after)


def error_from_message(status: Status) -> UnderstudyError:
    """Return the typed error for a ``google.rpc.Status`` in a message."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return error_from_status(code, status.message, retry_after_seconds=_retry_after_seconds(status))


def error_from_status(
    code: grpc.StatusCode, message: str, *, retry_after_seconds: float | None = None
) -> UnderstudyError:
    """Return the typed error for a status."""
    kind = _BY_CODE.get(code, UnderstudyError)
    if kind is OverloadedError and "larger than max" in message:  # gRPC uses one code for both
        remedy = "send fewer examples at once, or raise max_message_bytes here and --max-message-mib on the server"
        return MessageTooLargeError(f"{message}; {remedy}", code=code)
    message = _EXPLAINED.get(message, message) or f"the server gave no reason for {code.name}"
    if kind is UnauthenticatedError:
        message += f" {_WHERE_TO_GIVE_ONE}"
    error = kind(message, code=code)
    if isinstance(error, OverloadedError):
        error.retry_after_seconds = retry_after_seconds
    if isinstance(error, InternalError) and (found := _INCIDENT.search(message)):
        error.incident = found.group()
    return error


def _status_details(metadata: Sequence[tuple[str, Any]]) -> Status | None:
    """Return the ``google.rpc.Status`` in trailing metadata, if any."""
    details = next((value for key, value in metadata if key == _STATUS_DETAILS_KEY), None)
    if details is None:
        return None
    from google.protobuf.message import DecodeError
    from google.rpc.status_pb2 import Status

    try:
        return Status.FromString(details)
    except DecodeError:  # a proxy may send other details; the status is still valid
        return None


def _retry_after_seconds(status: Status) -> float | None:
    if not status.details:
        return None
    from google.protobuf.message import DecodeError
    from google.rpc.error_details_pb2 import RetryInfo

    retry_info = RetryInfo()
    try:
        if not any(detail.Unpack(retry_info) for detail in status.details):
            return None
    except DecodeError:  # as in `_status_details`
        return None
    return float(retry_info.retry_delay.ToTimedelta().total_seconds())
