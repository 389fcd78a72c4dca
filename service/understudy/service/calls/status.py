"""The status of a call: codes, the errors of requests, and the failure that a caller sees for an exception.

UnknownModelError                 the request names a model that this server does not serve
UnknownServiceError               a health request names a service that this server does not have
UnsupportedError                  this server does not support a call or a setting of the protocol
UnauthenticatedError              it is not known who calls
PermissionDeniedError             the caller may not do what the call does
CallEndedError                    the call has a status already
"""

from __future__ import annotations

import enum
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from understudy.evaluator import evaluator_errors
from understudy.wire import WireError


class Code(enum.IntEnum):
    """A ``google.rpc.Code``, which has the same numbers as gRPC's status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @property
    def label(self) -> str:
        """The value of the label ``grpc_code`` in go-grpc-middleware, such as ``InvalidArgument``."""
        if self is Code.OK:
            return "OK"
        if self is Code.CANCELLED:
            return "Canceled"
        return self.name.title().replace("_", "")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The status of a failed call.

    Attributes:
        code: The status code.
        message: A sentence for the caller.
        retry_after_seconds: How long to wait before a retry, if known.
    """

    code: Code
    message: str
    retry_after_seconds: float | None = None


CALLER_GONE: Final = Failure(code=Code.CANCELLED, message="the caller went away")
DEADLINE_PASSED: Final = Failure(code=Code.DEADLINE_EXCEEDED, message="the deadline passed before there was an answer")
EARLY_SECONDS: Final = 0.05
"""How long before the deadline a caller may give up because of it: its own timer began before its request came."""

COMPUTATION_CANCELLED: Final = Failure(code=Code.CANCELLED, message="the computation was cancelled")
SERVER_ENDED: Final = Failure(code=Code.UNAVAILABLE, message="the server ended before there was an answer")


def caller_gone(deadline: float | None) -> Failure:
    """Return why a caller has gone: its deadline, by the monotonic clock, or anything else."""
    has_passed = deadline is not None and deadline - time.monotonic() <= EARLY_SECONDS
    return DEADLINE_PASSED if has_passed else CALLER_GONE


class UnknownModelError(Exception):
    """The request names a model that this server does not serve. The text names the served model."""


class UnknownServiceError(Exception):
    """A health request names a service that this server does not have. The text lists the services."""


class UnsupportedError(Exception):
    """This server does not support a call or a setting of the protocol. The text says what to do instead."""


class UnauthenticatedError(Exception):
    """It is not known who calls. The text says what to send, and never quotes a token."""


class PermissionDeniedError(Exception):
    """The caller may not do what the call does. The text says what forbids it."""


class CallEndedError(Exception):
    """The call has a status already.

    Args:
        failure: The status.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_log = structlog.get_logger(__name__)

STATUS_CODES: Mapping[type[Exception], Code] = {
    evaluator_errors.InvalidInputError: Code.INVALID_ARGUMENT,
    WireError: Code.INVALID_ARGUMENT,
    UnknownModelError: Code.NOT_FOUND,
    UnknownServiceError: Code.NOT_FOUND,
    UnsupportedError: Code.UNIMPLEMENTED,
    UnauthenticatedError: Code.UNAUTHENTICATED,
    PermissionDeniedError: Code.PERMISSION_DENIED,
    evaluator_errors.VersionNotFoundError: Code.NOT_FOUND,
    evaluator_errors.DatasetNotFoundError: Code.NOT_FOUND,
    evaluator_errors.NoEarlierVersionError: Code.FAILED_PRECONDITION,
    evaluator_errors.NotReadyError: Code.UNAVAILABLE,
    evaluator_errors.DrainingError: Code.UNAVAILABLE,
    evaluator_errors.OverloadedError: Code.RESOURCE_EXHAUSTED,
    evaluator_errors.OutOfResourcesError: Code.RESOURCE_EXHAUSTED,
    evaluator_errors.DeadlineExceededError: Code.DEADLINE_EXCEEDED,
    evaluator_errors.CancelledError: Code.CANCELLED,
    evaluator_errors.StreamIdleError: Code.ABORTED,
    evaluator_errors.ModelChangedError: Code.FAILED_PRECONDITION,
    evaluator_errors.NotEvaluableError: Code.FAILED_PRECONDITION,
    evaluator_errors.ConfigurationError: Code.FAILED_PRECONDITION,
    evaluator_errors.DeviceError: Code.FAILED_PRECONDITION,
    evaluator_errors.LoadError: Code.FAILED_PRECONDITION,
    evaluator_errors.LedgerError: Code.FAILED_PRECONDITION,
    evaluator_errors.StorageError: Code.FAILED_PRECONDITION,
    evaluator_errors.ClusterError: Code.UNAVAILABLE,
}
"""Exceptions whose text is for the caller. A subclass has the code of its nearest ancestor here."""


LONGEST_MESSAGE = 700
"""The limit of a message in characters: it may quote the request, and gRPC limits metadata to 8 KiB."""


def failure_of(error: Exception) -> Failure:
    """Return the failure to report to the caller for an exception.

    An exception that is not in `STATUS_CODES` is a defect: its traceback goes to the log under an id, and the caller
    gets only the id.
    """
    if isinstance(error, CallEndedError):
        return error.failure
    for kind in type(error).__mro__:
        if kind in STATUS_CODES:
            retry_after = error.retry_after_seconds if isinstance(error, evaluator_errors.OverloadedError) else None
            return Failure(code=STATUS_CODES[kind], message=sentence(str(error)), retry_after_seconds=retry_after)
    incident = uuid.uuid4().hex
    _log.error("a call failed on a defect", incident=incident, exc_info=error)
    return Failure(code=Code.INTERNAL, message=f"internal error {incident}; see the server's log under this id")


def sentence(text: str) -> str:
    """Return a text for the caller, shortened to the limit and without characters that cannot be encoded."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"


DETAILS_KEY = "grpc-status-details-bin"
"""The trailing metadata key under which gRPC libraries look for a serialized ``google.rpc.Status``."""


def status_message(failure: Failure) -> Status:
    """Return the status of a failure, with ``RetryInfo`` if the time of a retry is known."""
    status = Status(code=failure.code, message=failure.message)
    if failure.retry_after_seconds is not None:
        fraction, whole = math.modf(max(0.0, failure.retry_after_seconds))
        delay = Duration(seconds=int(whole), nanos=round(fraction * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    return status


def status_details(failure: Failure) -> bytes | None:
    """Return a serialized `status_message` if it says more than the code and the message, else None."""
    status = status_message(failure)
    serialized: bytes | None = status.SerializeToString() if status.details else None
    return serialized
