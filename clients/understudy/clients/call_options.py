"""Options of single calls, as grpcio has them, and the trace context of the caller's program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import grpc

from understudy.clients.client_errors import UnauthenticatedError
from understudy.clients.token import AUTHORIZATION, BearerToken

Metadata = Sequence[tuple[str, str | bytes]]
"""Keys in lower case with their values; a value is bytes if its key ends with ``-bin``."""


class CallOptions(TypedDict, total=False):
    """Keyword arguments of every method that calls a server.

    Attributes:
        timeout_seconds: Overrides the client's timeout; for a stream, the whole stream's.
        metadata: Sent with the call, after the client's own metadata.
        credentials: Call credentials, such as ``grpc.access_token_call_credentials(token)``; only for a client with
            channel credentials. They replace the client's token, as does an entry ``authorization`` in ``metadata``.
        wait_for_ready: Whether to wait for a server that cannot be reached, until the deadline, instead of failing.
    """

    timeout_seconds: float | None
    metadata: Metadata
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None


class GrpcArguments(TypedDict):
    """Keyword arguments of a call of grpcio."""

    timeout: float
    metadata: tuple[tuple[str, str | bytes], ...]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None


@dataclass(frozen=True, kw_only=True)
class CallDefaults:
    """Completes the options of calls with a client's own.

    Attributes:
        timeout_seconds: The timeout of a call with one response.
        stream_timeout_seconds: The timeout of a streaming call.
        metadata: Sent with every call.
        is_secure: Whether the channel may carry call credentials.
        token: The token of every call, if any.
    """

    timeout_seconds: float
    stream_timeout_seconds: float
    metadata: Metadata
    is_secure: bool
    token: BearerToken | None

    def unary(self, call: CallOptions) -> GrpcArguments:
        """Return the arguments of a call with one response.

        Raises:
            TypeError: An option does not exist.
            UnauthenticatedError: There are call credentials, and the channel is not secure.
        """
        return self._completed(self.timeout_seconds, **call)

    def stream(self, call: CallOptions) -> GrpcArguments:
        """Return the arguments of a streaming call; raise as `unary`."""
        return self._completed(self.stream_timeout_seconds, **call)

    def _completed(
        self,
        default_timeout_seconds: float,
        *,
        timeout_seconds: float | None = None,
        metadata: Metadata = (),
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
    ) -> GrpcArguments:
        if credentials is not None and not self.is_secure:
            raise UnauthenticatedError(
                "call credentials are sent over secure channels only; give the client channel credentials too",
                code=grpc.StatusCode.UNAUTHENTICATED,
            )
        return GrpcArguments(
            timeout=default_timeout_seconds if timeout_seconds is None else timeout_seconds,
            metadata=(
                *current_trace_context(),
                *self.metadata,
                *self._authorization(metadata, credentials),
                *metadata,
            ),
            credentials=credentials,
            wait_for_ready=wait_for_ready,
        )

    def _authorization(self, metadata: Metadata, credentials: grpc.CallCredentials | None) -> Metadata:
        if self.token is None or credentials is not None or any(key == AUTHORIZATION for key, _ in metadata):
            return ()
        return ((AUTHORIZATION, self.token.header),)


def without_timeout(call: CallOptions) -> CallOptions:
    """Return the options for another call that this one makes first."""
    rest = call.copy()
    rest.pop("timeout_seconds", None)
    return rest


def current_trace_context() -> tuple[tuple[str, str], ...]:
    """Return the metadata of the current span, by OpenTelemetry's propagators; none outside of spans.

    OpenTelemetry is no dependency: a program without it has no current span, and one that has not imported it neither.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return ()
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return tuple((name.lower(), value) for name, value in headers.items())
