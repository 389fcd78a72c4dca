"""HTTP responses: the status of a failure, a message as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message
from starlette.responses import JSONResponse

from understudy.service.handlers.codes import Code
from understudy.service.handlers.failures import Failure

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; gRPC's own table has it for CANCELLED."""

HTTP_STATUS: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ABORTED: 409,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: CLIENT_CLOSED_REQUEST,
    Code.INTERNAL: 500,
    Code.UNKNOWN: 500,
    Code.DATA_LOSS: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""The table of ``google/rpc/code.proto``."""


def failure_response(failure: Failure) -> JSONResponse:
    """Return a failure in the protocol's form: its message under ``error``."""
    headers = {}
    if failure.retry_after_seconds is not None:
        headers["retry-after"] = str(math.ceil(failure.retry_after_seconds))
    return JSONResponse({"error": failure.message}, status_code=HTTP_STATUS[failure.code], headers=headers)


def as_json(message: Message) -> dict[str, Any]:
    """Return every field of a message under its own name, numbers as numbers.

    `google.protobuf.json_format` would turn 64-bit numbers into text, unlike the protocol.
    """
    fields = [field for field in message.DESCRIPTOR.fields if not field.has_presence or message.HasField(field.name)]
    return {field.name: _value(field, getattr(message, field.name)) for field in fields}


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_value = field.message_type.fields_by_name["value"]
        return {str(key): _single(of_value, each) for key, each in value.items()}
    return [_single(field, each) for each in value] if field.is_repeated else _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name
