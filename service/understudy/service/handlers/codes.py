"""The status codes an RPC can end with."""

from __future__ import annotations

import enum


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
