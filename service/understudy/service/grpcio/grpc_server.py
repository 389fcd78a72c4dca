"""The grpcio front end: grpc.aio servers and their port, and the endpoints of the methods, from bytes to bytes."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.addresses import host_and_port
from understudy.service.calls.body_budget import BodyBudget, StreamReservation
from understudy.service.calls.compression import MessageDecompressor
from understudy.service.calls.methods import CoalescingOptions, RpcType
from understudy.service.calls.served_call import (
    MAX_HEADER_BYTES,
    REQUEST_ID_HEADER,
    Call,
    ServedMethod,
    ServedMethods,
    built,
    check_headers,
)
from understudy.service.calls.status import (
    COMPUTATION_CANCELLED,
    DETAILS_KEY,
    CallEndedError,
    Code,
    Failure,
    caller_gone,
    status_details,
)
from understudy.service.front_end import (
    HANDSHAKE_SECONDS,
    KEEPALIVE_SECONDS,
    KEEPALIVE_TIMEOUT_SECONDS,
    MAX_STREAMS,
    Main,
    handle_signals,
    reserve,
)
from understudy.service.listening_settings import ConnectionLimits
from understudy.service.service_errors import grpc_port_in_use
from understudy.service.settings import ServeSettings
from understudy.service.tls import Certificates, ServerCertificates, certificate_names

_T = TypeVar("_T")

MIN_PING_SECONDS = 10
"""How often a client may ping an idle connection. gRPC's default of 300 s would disconnect watches that do."""

STREAM_WINDOW_BYTES = 1 << 20
"""How much of a stream gRPC's core reads ahead, beside the message that is being read, for which it makes room."""

SERVERS = 8
"""How many servers share the port and the event loop. Each server takes one call per loop iteration from gRPC's core;
with several, calls of several connections arrive in one iteration, and so do their responses."""


def run(settings: ServeSettings, main: Main[_T]) -> _T:
    """Run the service with this front end; see `understudy.service.front_end.RunFrontEnd`."""
    import uvloop  # each event of gRPC's core takes a loop iteration, so a faster loop matters

    return uvloop.run(main(partial(server_of, settings), handle_signals))


def server_of(settings: ServeSettings, certificates: ServerCertificates | None = None) -> GrpcServer:
    """Return the front end of these settings."""
    return GrpcServer(
        certificates,
        max_message_bytes=settings.max_message_bytes,
        max_body_bytes=settings.max_body_bytes,
        connections=settings.connections,
    )


class GrpcServer:
    """The grpcio front end. Belongs to the event loop on which it is created.

    Args:
        certificates: The certificates for TLS; None to serve without TLS.
        max_message_bytes: The largest message to receive or send.
        max_body_bytes: The most bytes that the messages of all streams together may hold.
        connections: The limits of its connections.
    """

    coalescing: Final = CoalescingOptions(loop_turns=16, examples=128)
    """A call takes four events of gRPC's core, one or two loop iterations apart."""

    def __init__(
        self,
        certificates: ServerCertificates | None = None,
        *,
        max_message_bytes: int,
        max_body_bytes: int,
        connections: ConnectionLimits,
    ) -> None:
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.per_message_decompression", 0),  # gRPC's core would decompress all messages that wait at once
            ("grpc.http2.bdp_probe", 0),  # it widens the window of unread streams to many mebibytes
            ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
            ("grpc.so_reuseport", 1),  # for the servers of this process; `reserve` keeps other processes out
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_SECONDS * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            *_connection_options(connections),
        )
        self._servers = [grpc.aio.server(options=options) for _ in range(SERVERS)]
        self._certificates = certificates
        self._decompressor = MessageDecompressor(max_message_bytes)
        self._bodies = BodyBudget(max_body_bytes)
        self._method_handlers: MethodHandlers | None = None

    def bind(self, host: str, port: int) -> int:
        """Bind a port, or any free port for 0, and return it.

        Raises:
            PortInUseError: The port is not available.
        """
        with reserve(host, port) as reserved:
            port = reserved.getsockname()[1]
            try:
                for server in self._servers:
                    self._listen(server, host_and_port(host, port))
            except RuntimeError as error:
                raise grpc_port_in_use(host, port) from error
        return port

    def _listen(self, server: grpc.aio.Server, address: str) -> None:
        if self._certificates is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(self._certificates))

    async def start(self, methods: ServedMethods) -> None:
        """Start to serve calls of these methods; called again, serve calls of other methods from now on."""
        if self._method_handlers is not None:
            self._method_handlers.replace(methods)
            return
        self._method_handlers = MethodHandlers(methods, self._decompressor, self._bodies)
        for server in self._servers:
            server.add_generic_rpc_handlers((self._method_handlers,))
            await server.start()

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, let running ones finish, and cancel the rest when the time is up.

        Endless streams end when the service's readiness changes to draining.
        """
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))


def _connection_options(connections: ConnectionLimits) -> list[tuple[str, int]]:
    """Return the channel arguments of each of the servers."""
    milliseconds = {
        "grpc.max_connection_idle_ms": connections.idle_seconds,
        "grpc.max_connection_age_ms": connections.age_seconds,  # gRPC's core adds the jitter
        "grpc.max_connection_age_grace_ms": connections.grace_seconds if connections.age_seconds else 0,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_SECONDS,
        "grpc.keepalive_time_ms": KEEPALIVE_SECONDS,
        "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_SECONDS,
    }
    return [
        *((name, round(seconds * 1000)) for name, seconds in milliseconds.items() if seconds),
        ("grpc.max_allowed_incoming_connections", math.ceil(connections.count / SERVERS)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_HEADER_BYTES),  # gRPC's core draws lots about calls between this and the next
        ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
        # Else gRPC's core also refuses calls while Python has not yet let go of ended ones, though few are under way.
        ("grpc.http.overload_protection", 0),
    ]


def _credentials(certificates: ServerCertificates) -> grpc.ServerCredentials:
    """Return credentials for one server. gRPC asks for a change before each handshake, separately for each server."""
    used = certificates.current

    def change() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        current = certificates.current
        if current is used:
            return None
        used = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        change,  # type: ignore[arg-type]  # the stubs lack None, which means no change
        require_client_authentication=used.requires_client,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.certificate)], root_certificates=certificates.client_ca
    )


if TYPE_CHECKING:  # generic in the stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
    MethodHandler = grpc.RpcMethodHandler[Any, Any]
    GenericHandler = grpc.GenericRpcHandler[Any, Any]
else:
    Context = grpc.aio.ServicerContext
    MethodHandler = grpc.RpcMethodHandler
    GenericHandler = grpc.GenericRpcHandler

_STATUSES: Final = {Code(status.value[0]): status for status in grpc.StatusCode}
_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs

_COMPRESSED: Final = frozenset({b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"})
"""How messages begin that are compressed with gzip or deflate. gRPC's core keeps the flag to itself. No request begins
like this: the first is no valid tag, and the others are the tag of a field 15, which none has."""


class GrpcCall(Call):
    """A call of grpc.aio, which enforces the deadline and cancels the task when the caller disconnects.

    Args:
        context: grpc's context of the call.
    """

    __slots__ = ("_cancelled", "_metadata", "context")

    def __init__(self, context: Context) -> None:
        self.context = context
        self._metadata = context.invocation_metadata() or ()  # grpc converts it each time
        self._cancelled = False
        super().__init__()

    @property
    def peer(self) -> str:
        """See `Call`."""
        return str(self.context.peer())

    def certificate_names(self) -> Sequence[str]:
        """See `Call`."""
        certificate = self.context.auth_context().get("x509_pem_cert")
        return certificate_names(*certificate) if certificate else ()

    def header(self, name: str) -> str | bytes | None:
        """See `Call`."""
        for key, value in self._metadata:
            if key == name:
                return value
        return None

    def count_of(self, name: str) -> int:
        """See `Call`."""
        return sum(key == name for key, _ in self._metadata)

    def open(self) -> None:
        """See `Call`; raise CallEndedError if the headers are too large."""
        check_headers(self._metadata)
        remaining = cast("float | None", self.context.time_remaining())
        self.deadline = None if remaining is None else time.monotonic() + remaining
        if self.has_callers_id:
            self.context.set_trailing_metadata(((REQUEST_ID_HEADER, self.request_id),))

    def close(self) -> None:
        """See `Call`."""

    def has_gone(self) -> CallEndedError:
        """Return the error of a caller that has gone, of which gRPC's core told before it cancels the task."""
        self._cancelled = True
        return CallEndedError(caller_gone(self.deadline))

    def why_cancelled(self) -> Failure:
        """See `Call`."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            return COMPUTATION_CANCELLED
        self._cancelled = True
        return caller_gone(self.deadline)

    async def fail(self, failure: Failure) -> None:
        """End the call with a failure, its id, and ``google.rpc.RetryInfo`` if the time of a retry is known.

        Raises:
            AbortError: Always, as grpc expects it, but if grpc cancelled the call: CancelledError.
        """
        if self._cancelled:
            raise asyncio.CancelledError
        trailing: tuple[tuple[str, str | bytes], ...] = ((REQUEST_ID_HEADER, self.request_id),)
        details = status_details(failure)
        if details is not None:
            trailing = (*trailing, (DETAILS_KEY, details))
        await self.context.abort(_STATUSES[failure.code], failure.message, trailing)


class Endpoint(ABC):
    """Serves the calls of one method, from bytes to bytes.

    Args:
        served: The method.
        decompressor: Decompresses messages.
        bodies: Bounds the memory of the messages of streams.
    """

    def __init__(self, served: ServedMethod, decompressor: MessageDecompressor, bodies: BodyBudget) -> None:
        self._served = served
        self._bodies = bodies
        self._decompress = decompressor.decompress
        self._handle: Any = served.method.answer
        self._encode = served.encode

    async def call(self, _requests: Any, context: Context) -> bytes | None:
        """Serve a call; grpc calls this function.

        Args:
            _requests: grpc's own iterator of requests, which is not used.
            context: The call.

        Returns:
            The response, or None if responses have been written.
        """
        return await self._served.serve(GrpcCall(context), self._answer)

    @abstractmethod
    async def _answer(self, call: GrpcCall) -> bytes | None:
        """Call the handler; return its response, or write its responses."""

    async def _one_request(self, call: GrpcCall) -> Any:
        """Read the single message of a call.

        For grpc it is a stream: so a refused request is never read, and a call without a message is answered.
        """
        data = await call.context.read()
        if data is _EOF:
            raise InvalidInputError(f"got no message; {self._served.method.rpc.path} takes one")
        if data[:2] in _COMPRESSED:
            data = await self._decompress(data)
        return self._served.decode(call, data)

    async def _each_request(self, call: GrpcCall) -> AsyncIterator[Any]:
        read, decode = call.context.read, self._served.decode
        call.held = held = StreamReservation(self._bodies)
        while (data := await read()) is not _EOF:
            await held.arrive(len(data))
            held.complete(len(data))
            if call.usage is not None:
                await call.usage.throttle()
            received = [await self._decompress(data) if data[:2] in _COMPRESSED else data]
            del data
            await held.grow(len(received[0]))
            yield decode(call, received.pop())  # nothing here keeps it while the next one is not asked for
            await held.expect_another()

    async def _send_each(self, requests: Any, call: GrpcCall) -> None:
        write, encode, served = call.context.write, self._encode, self._served
        is_patient = served.method.patience_seconds is None
        try:
            async with aclosing(self._handle(requests, call)) as responses:
                async for response in responses:
                    sending = write(await built(encode(response)))
                    if is_patient:
                        await sending
                        served.sent(call)
                    else:
                        await served.send(call, sending)
        except grpc.aio.InternalError:
            raise call.has_gone() from None


class UnaryEndpoint(Endpoint):
    """One request, one response."""

    async def _answer(self, call: GrpcCall) -> bytes:
        response = await self._handle(await self._one_request(call), call)
        data = await built(self._encode(response))
        self._served.sent(call)
        return data


class ClientStreamEndpoint(Endpoint):
    """Any number of requests, one response."""

    async def _answer(self, call: GrpcCall) -> bytes:
        response = await self._handle(self._each_request(call), call)
        data = await built(self._encode(response))
        self._served.sent(call)
        return data


class ServerStreamEndpoint(Endpoint):
    """One request, any number of responses."""

    async def _answer(self, call: GrpcCall) -> None:
        await self._send_each(await self._one_request(call), call)


class BidiStreamEndpoint(Endpoint):
    """Any number of requests, any number of responses."""

    async def _answer(self, call: GrpcCall) -> None:
        await self._send_each(self._each_request(call), call)


_KINDS: Final[Mapping[RpcType, tuple[type[Endpoint], Any]]] = {
    "unary": (UnaryEndpoint, grpc.stream_unary_rpc_method_handler),
    "client_stream": (ClientStreamEndpoint, grpc.stream_unary_rpc_method_handler),
    "server_stream": (ServerStreamEndpoint, grpc.stream_stream_rpc_method_handler),
    "bidi_stream": (BidiStreamEndpoint, grpc.stream_stream_rpc_method_handler),
}
"""For each kind of method its endpoint, and grpc's function for it."""


class MethodHandlers(GenericHandler):
    """The method lookup for grpc.

    Args:
        methods: The methods to serve.
        decompressor: Decompresses messages.
        bodies: Bounds the memory of the messages of streams.
    """

    def __init__(self, methods: ServedMethods, decompressor: MessageDecompressor, bodies: BodyBudget) -> None:
        self._decompressor = decompressor
        self._bodies = bodies
        self.replace(methods)

    def replace(self, methods: ServedMethods) -> None:
        """Look up other methods from now on."""
        self._handlers = {path: _handler(served, self._decompressor, self._bodies) for path, served in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler | None:
        """See `grpc.GenericRpcHandler`."""
        return self._handlers.get(handler_call_details.method)


def _handler(served: ServedMethod, decompressor: MessageDecompressor, bodies: BodyBudget) -> MethodHandler:
    endpoint, make = _KINDS[served.method.rpc.rpc_type]
    handler: MethodHandler = make(endpoint(served, decompressor, bodies).call)
    return handler
