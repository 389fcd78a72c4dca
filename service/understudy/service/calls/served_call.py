"""One call of one method, and what is around every call, whatever its transport.

A transport passes on a `Call`; `ServedMethod` gives it metrics, admission, errors, and its lines in the access log and
the audit log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeVar

import structlog
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from understudy.evaluator.evaluator_errors import InvalidInputError, OverloadedError
from understudy.service.calls.audit import audit_call
from understudy.service.calls.body_budget import StreamReservation
from understudy.service.calls.caller import CallUsage
from understudy.service.calls.methods import CallContext, Encoded, Method, RpcMethod, Service
from understudy.service.calls.metrics import MethodMetrics, RpcMetrics
from understudy.service.calls.status import CALLER_GONE, CallEndedError, Code, Failure, failure_of
from understudy.service.calls.trace import TRACE_IDS, CallTrace

REQUEST_ID_HEADER: Final = "x-request-id"
"""The metadata key of the id that links a call's log lines to the caller's logs, in requests and responses."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current task's call; empty outside of calls."""

MAX_OPEN_STREAMS: Final = 4_096
"""The most streams of one method at once, from all callers: as many as servers may follow an evaluator. An idle stream
costs memory and some of the event loop's time all the same, and a watch of the health is open to callers without a
name."""

_RETRY_SECONDS: Final = 5.0
_PROCESS: Final = secrets.token_hex(8)
_NUMBERS: Final = itertools.count(1)
_ACCEPTABLE: Final = re.compile(r"[!-~]{1,128}")


def accept_id(candidate: str | bytes | None) -> str:
    """Return the caller's id if it is 1 to 128 printable ASCII characters, else a new one of 32 hexadecimal digits."""
    if isinstance(candidate, str) and _ACCEPTABLE.fullmatch(candidate):
        return candidate
    return f"{_PROCESS}{next(_NUMBERS):016x}"


MAX_HEADER_BYTES: Final = 61_440
"""The most that the headers of a call may have; clients learn of it when they connect. It is Envoy's default, and four
times that of gRPC's own servers."""
_FIELD_BYTES: Final = 32
"""What each field adds to its name and its value (RFC 9113, 6.5.2)."""


def check_headers(fields: Collection[Any]) -> None:
    """Check the size of headers, each a name and a value.

    gRPC's core does not check those that a caller sends without the index of its compression.

    Raises:
        CallEndedError: They are too large.
    """
    size = sum(map(len, itertools.chain.from_iterable(fields))) + _FIELD_BYTES * len(fields)
    if size > MAX_HEADER_BYTES:
        message = f"the headers have {size} bytes; {MAX_HEADER_BYTES} is the limit, in which each field counts 32 more"
        raise CallEndedError(Failure(code=Code.RESOURCE_EXHAUSTED, message=message))


async def built(encoded: Encoded) -> bytes:
    """Return the bytes of a response, built on another thread if that is still to do."""
    return encoded if isinstance(encoded, bytes) else await asyncio.to_thread(encoded)


def owner_of(array: Any) -> tuple[Any, int]:
    """Return what an array keeps from being freed, and its size: itself, or the message or batch that it is part of."""
    owner = array
    while getattr(owner, "base", None) is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner, len(owner) if isinstance(owner, bytes | bytearray) else int(getattr(owner, "nbytes", 0))


class Call(CallContext, ABC):
    """One call of one method. A transport implements it, and `ServedMethod.serve` drives it, in one task.

    Attributes:
        held: What the messages of its request stream hold; None before it is read, and for other calls.
        has_callers_id: Whether the caller sent the id; then every response carries it.
        received_bytes: The size of the request messages so far, decompressed.
        request_id: The id of the call.
        usage: What the call counts against its caller's limits; None without a caller.
        started: When it began, on `time.monotonic`'s clock in seconds.
    """

    __slots__ = ("has_callers_id", "held", "received_bytes", "request_id", "started", "usage")

    held: StreamReservation | None
    usage: CallUsage | None

    def __init__(self) -> None:  # sets what `CallContext` would, as each function costs every call
        self.audited = None
        self.caller = None
        self.deadline = None
        self.held = None
        self.usage = None
        self.trace = None
        self.started = time.monotonic()
        self.received_bytes = 0
        came = self.header(REQUEST_ID_HEADER)
        self.has_callers_id = came is not None
        self.request_id = accept_id(came)

    def message_done(self) -> None:
        """See `CallContext`."""
        if self.usage is not None:
            self.usage.release_oldest()
        if self.held is not None:
            self.held.release_oldest()

    @property
    @abstractmethod
    def peer(self) -> str:
        """The address of the caller, as the transport writes it."""

    def certificate_names(self) -> Sequence[str]:
        """Return the names in the caller's verified certificate, the most specific first; none without one."""
        return ()

    @abstractmethod
    def header(self, name: str) -> str | bytes | None:
        """Return the value of a metadata key or header that the caller sent, by its name in lower case."""

    @abstractmethod
    def count_of(self, name: str) -> int:
        """Return how often the caller sent a metadata key or header, by its name in lower case."""

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

    def span_name(self) -> str:
        """Return the name of the span of the call."""
        return self.method[1:]

    def span_attributes(self) -> dict[str, str | int]:
        """Return the attributes of the span that are known when the call begins, by OpenTelemetry's conventions."""
        return {"rpc.system.name": "grpc", "rpc.method": self.method[1:]}

    def span_outcome(self, failure: Failure | None) -> dict[str, str | int]:
        """Return the attributes of the span that are known when the call has ended."""
        code = (Code.OK if failure is None else failure.code).name
        return {"rpc.status_code": code, "rpc.response.status_code": code}


CALL_LOGGER: Final = __name__
"""The logger that writes a line for each call that has ended."""

_log = structlog.get_logger(CALL_LOGGER)
_threshold: Final = logging.getLogger(CALL_LOGGER)
"""Checks whether a line would be written, at a tenth of the cost of `_log`."""

_Call = TypeVar("_Call", bound=Call)
_Response = TypeVar("_Response")


class Guard(Protocol):
    """Checks who calls."""

    def admit(self, call: Call, method: Method) -> None:
        """Set the caller and the usage of a call.

        Raises:
            UnauthenticatedError: It is not known who calls.
            PermissionDeniedError: The caller may not call the method.
            OverloadedError: The caller is beyond its limits.
        """


class CallTracer(Protocol):
    """Decides which calls are traced."""

    def begin(self, call: Call) -> CallTrace | None:
        """Return the trace of a call that begins now; None if it is not traced."""


class ServedMethod:
    """One method as every front end serves it. Belongs to the event loop's thread.

    Args:
        method: The method.
        metrics: Counts and times its calls.
        guard: Checks who calls; None to admit every caller.
        tracer: Traces the calls; None for none.

    Attributes:
        method: The method.
        encode: Returns the bytes of a response.
    """

    def __init__(
        self, method: Method, metrics: MethodMetrics, guard: Guard | None = None, tracer: CallTracer | None = None
    ) -> None:
        self.method = method
        self._guard = guard
        self._tracer = tracer
        self._metrics = metrics
        self._path = method.rpc.path
        self._is_stream = method.rpc.streams_requests or method.rpc.streams_responses
        self._open = 0
        self._admit = method.admit
        self._decode = method.codec.decode
        self.encode = method.codec.encode

    async def serve(self, call: _Call, answer: Callable[[_Call], Awaitable[_Response]]) -> _Response | None:
        """Serve a call.

        Args:
            call: The call.
            answer: The transport's part: reads the request, calls the handler, and sends or returns the response.

        Returns:
            What ``answer`` returns, or None if the call failed and the failure was sent.
        """
        self._metrics.started_calls += 1
        self._open += 1
        call.method = self._path
        REQUEST_ID.set(call.request_id)
        if self._tracer is not None:
            call.trace = self._tracer.begin(call)
            TRACE_IDS.set(None if call.trace is None else call.trace.ids)
        try:
            call.open()
            if self._is_stream:
                self._check_open_streams()
            if self._guard is not None:
                self._guard.admit(call, self.method)
            if self._admit is not None:
                self._admit(call)
            response = await answer(call)
        except asyncio.CancelledError:
            failure = self._why_cancelled(call)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            failure = failure_of(error)
        except BaseException:  # the event loop ends, and closes its coroutines
            self._end(call, CALLER_GONE)
            raise
        else:
            call.close()
            self._end(call, None)
            return response
        call.close()
        try:
            await call.fail(failure)
        finally:
            self._end(call, failure)
        return None

    def _check_open_streams(self) -> None:
        if self._open > MAX_OPEN_STREAMS:
            raise OverloadedError(
                f"{MAX_OPEN_STREAMS} streams of {self._path} are open, the limit; try again when one has ended",
                retry_after_seconds=_RETRY_SECONDS,
            )

    def received(self, call: Call, size: int) -> None:
        """Count a request message of this many bytes, which has arrived.

        Raises:
            InvalidInputError: It is larger than all that its caller may have under way.
            OverloadedError: Its caller has too many bytes under way.
        """
        self._metrics.received_messages += 1
        call.received_bytes += size
        if call.usage is not None:
            call.usage.hold(size)

    async def send(self, call: Call, sending: Awaitable[None]) -> None:
        """Wait until a message of a stream is sent, and count it.

        Raises:
            CallEndedError: Its caller took nothing for too long.
        """
        patience = self.method.patience_seconds
        if patience is None:
            await sending
        else:
            await _patiently(sending, patience)
        self.sent(call)

    def sent(self, call: Call) -> None:
        """Count a sent message."""
        self._metrics.sent_messages += 1
        call.message_done()

    def decode(self, call: Call, data: bytes, begin: int = 0) -> Any:
        """Return the request in ``data[begin:]``, which has arrived.

        Raises:
            InvalidInputError: The bytes cannot be parsed, or see `received`.
            OverloadedError: See `received`.
        """
        self.received(call, len(data) - begin)
        try:
            return self._decode(data, begin)
        except DecodeError as error:
            raise InvalidInputError(
                f"cannot parse {len(data) - begin} bytes as a request of {self._path}; encode it as its .proto says"
            ) from error

    def _why_cancelled(self, call: Call) -> Failure:
        try:
            return call.why_cancelled()
        except asyncio.CancelledError:
            call.close()
            self._end(call, CALLER_GONE)
            raise

    def _end(self, call: Call, failure: Failure | None) -> None:
        """Count the call, and log it: at debug if it succeeded, since there may be thousands a second, else at info."""
        seconds = time.monotonic() - call.started
        self._open -= 1
        if call.usage is not None:
            call.usage.leave()
        if call.held is not None:
            call.held.close()
        self._metrics.handled(Code.OK if failure is None else failure.code, seconds=seconds)
        if call.trace is not None:
            self._metrics.seconds.exemplify(seconds, call.trace.ids)
            call.trace.end(failure, call.span_outcome(failure))
        if failure is not None or call.audited is not None:
            audit_call(call, self._path, failure)
        if failure is not None:
            self._write(_log.info, call, failure.code, failure.message, seconds)
        elif _threshold.isEnabledFor(logging.DEBUG):
            self._write(_log.debug, call, Code.OK, "", seconds)

    def _write(self, log: Callable[..., Any], call: Call, code: Code, message: str, seconds: float) -> None:
        log(
            "call ended",
            method=self._path,
            peer=call.peer,
            **({} if call.caller is None else {"caller": call.caller.name}),
            code=code.name,
            message=message,
            seconds=seconds,
            received_bytes=call.received_bytes,
        )


ServedMethods = Mapping[str, ServedMethod]
"""The methods that front ends serve, by path, such as ``/package.Service/Method``."""


_UNTRACED: Final = frozenset(
    {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "understudy.v1.MetricsService",
    }
)
"""The services whose calls are not traced: probes and scrapes."""
_PROBES: Final = frozenset({"ServerLive", "ServerReady", "ModelReady"})


def served_methods(
    services: Iterable[Service],
    registry: CollectorRegistry,
    guard: Guard | None = None,
    tracer: CallTracer | None = None,
) -> ServedMethods:
    """Return the methods of services as front ends serve them.

    Args:
        services: The services.
        registry: Where to register the ``grpc_server_*`` metrics.
        guard: Checks who calls; None to admit every caller.
        tracer: Traces the calls, but for probes and scrapes; None for none.
    """
    methods = [method for service in services for method in service.methods]
    metrics = RpcMetrics(registry, [method.rpc for method in methods])
    return {
        method.rpc.path: ServedMethod(
            method, metrics.of(method.rpc.path), guard, None if _is_probe(method.rpc) else tracer
        )
        for method in methods
    }


def _is_probe(method: RpcMethod) -> bool:
    return method.service in _UNTRACED or method.name in _PROBES


async def _patiently(sending: Awaitable[None], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await sending
    except TimeoutError:
        message = f"the caller took nothing of the answer for {seconds:g} s; call again"
        raise CallEndedError(Failure(code=Code.ABORTED, message=message)) from None
