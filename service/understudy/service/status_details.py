"""The details of a failure beyond its code and message."""

from __future__ import annotations

import math

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from understudy.service.handlers.failures import Failure

DETAILS_KEY = "grpc-status-details-bin"
"""The trailing metadata key under which gRPC libraries look for a serialized ``google.rpc.Status``."""


def status_details(failure: Failure) -> bytes | None:
    """Return a serialized ``google.rpc.Status`` with ``RetryInfo`` if the time of a retry is known, else None."""
    if failure.retry_after_seconds is None:
        return None
    fraction, whole = math.modf(max(0.0, failure.retry_after_seconds))
    delay = Duration(seconds=int(whole), nanos=round(fraction * 1e9))
    detail = AnyMessage()
    detail.Pack(RetryInfo(retry_delay=delay))
    serialized: bytes = Status(code=failure.code, message=failure.message, details=[detail]).SerializeToString()
    return serialized
