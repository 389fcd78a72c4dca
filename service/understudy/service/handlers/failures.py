"""Maps exceptions to the status that a caller sees."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from understudy.evaluator import evaluator_errors
from understudy.service.handlers.codes import Code
from understudy.service.handlers.request_errors import UnknownModelError, UnknownServiceError, UnsupportedError
from understudy.wire import WireError

_log = structlog.get_logger(__name__)

STATUS_CODES: Mapping[type[Exception], Code] = {
    evaluator_errors.InvalidInputError: Code.INVALID_ARGUMENT,
    WireError: Code.INVALID_ARGUMENT,
    UnknownModelError: Code.NOT_FOUND,
    UnknownServiceError: Code.NOT_FOUND,
    UnsupportedError: Code.UNIMPLEMENTED,
    evaluator_errors.VersionNotFoundError: Code.NOT_FOUND,
    evaluator_errors.DatasetNotFoundError: Code.NOT_FOUND,
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
}
"""Exceptions whose text is for the caller. A subclass has the code of its nearest ancestor here."""


LONGEST_MESSAGE = 700
"""The limit of a message in characters: it may quote the request, and gRPC limits metadata to 8 KiB."""


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


def failure_of(error: Exception) -> Failure:
    """Return the failure to report to the caller for an exception.

    An exception that is not in `STATUS_CODES` is a defect: its traceback goes to the log under an id, and the caller
    gets only the id.
    """
    for kind in type(error).__mro__:
        if kind in STATUS_CODES:
            retry_after = error.retry_after_seconds if isinstance(error, evaluator_errors.OverloadedError) else None
            return Failure(code=STATUS_CODES[kind], message=_sentence(error), retry_after_seconds=retry_after)
    incident = uuid.uuid4().hex
    _log.error("a call failed on a defect", incident=incident, exc_info=error)
    return Failure(code=Code.INTERNAL, message=f"internal error {incident}; see the server's log under this id")


def _sentence(error: Exception) -> str:
    """Return an exception's text, shortened to the limit and without characters that cannot be encoded."""
    text = str(error).encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"
