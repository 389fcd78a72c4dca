"""Converts failures to gRPC statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc

from understudy.service import request_id
from understudy.service.handlers.codes import Code
from understudy.service.handlers.failures import Failure
from understudy.service.status_details import DETAILS_KEY, status_details

if TYPE_CHECKING:  # generic in the stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext

GRPC_STATUS = {Code(status.value[0]): status for status in grpc.StatusCode}


async def abort(context: Context, failure: Failure) -> NoReturn:
    """End a call with a failure, its id, and ``google.rpc.RetryInfo`` if the time of a retry is known."""
    trailing: tuple[tuple[str, str | bytes], ...] = ((request_id.HEADER, request_id.current.get()),)
    details = status_details(failure)
    if details is not None:
        trailing = (*trailing, (DETAILS_KEY, details))
    await context.abort(GRPC_STATUS[failure.code], failure.message, trailing)


def code_of(context: Context) -> Code:
    """Return the current status of a call."""
    code = cast("grpc.StatusCode | None", context.code())
    return Code.OK if code is None else Code(code.value[0])


def message_of(context: Context) -> str:
    """Return the current status message of a call; empty on success."""
    details = cast("str | bytes | None", context.details())
    return details.decode(errors="replace") if isinstance(details, bytes) else details or ""


def code_when_cancelled(context: Context) -> Code:
    """Return why a call was cancelled: its deadline passed, or its caller disconnected."""
    remaining = cast("float | None", context.time_remaining())
    return Code.DEADLINE_EXCEEDED if remaining is not None and remaining <= 0 else Code.CANCELLED
