"""The methods of a service and their handlers, for any transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from understudy.service.calls.caller import Access, Caller
from understudy.service.calls.parsing import parse, parse_zero_copy
from understudy.service.calls.status import UnsupportedError
from understudy.service.calls.trace import CallTrace

RpcType = Literal["unary", "client_stream", "server_stream", "bidi_stream"]


@dataclass(frozen=True, kw_only=True)
class RpcMethod:
    """One method of one service."""

    service: str
    name: str
    rpc_type: RpcType

    @property
    def path(self) -> str:
        """The method's path in HTTP/2."""
        return f"/{self.service}/{self.name}"

    @property
    def streams_requests(self) -> bool:
        """Whether its callers send any number of messages."""
        return self.rpc_type in {"client_stream", "bidi_stream"}

    @property
    def streams_responses(self) -> bool:
        """Whether its callers get any number of messages."""
        return self.rpc_type in {"server_stream", "bidi_stream"}


def methods_of(*services: ServiceDescriptor) -> Iterator[RpcMethod]:
    """Yield every method of services."""
    types: dict[tuple[bool, bool], RpcType] = {
        (False, False): "unary",
        (True, False): "client_stream",
        (False, True): "server_stream",
        (True, True): "bidi_stream",
    }
    for service in services:
        for method in service.methods:
            rpc_type = types[method.client_streaming, method.server_streaming]
            yield RpcMethod(service=service.full_name, name=method.name, rpc_type=rpc_type)


_Request_co = TypeVar("_Request_co", covariant=True)
_Response_contra = TypeVar("_Response_contra", contravariant=True)


class CallContext:
    """The context of one call, for its handler. A disconnect of the caller cancels the handler's asyncio task.

    Attributes:
        audited: What the call decides, as fields of the audit log, which its handler sets; None if nothing. The field
            ``event`` is the name of the line, by default that the serving version was requested.
        caller: Who calls; None if the service has no file of callers, or the method is open to all.
        deadline: When the caller stops waiting, on `time.monotonic`'s clock in seconds; None if never.
        method: The path of the method, such as ``/package.Service/Method``; empty outside of a server.
        progress: Called on any thread with how many examples are scored, and of how many; None if nothing is.
        trace: Records the call; None if it is not traced.
    """

    __slots__ = ("audited", "caller", "deadline", "method", "trace")

    audited: Mapping[str, Any] | None
    caller: Caller | None
    progress: Callable[[int, int | None], None] | None = None
    trace: CallTrace | None

    def __init__(self, *, deadline: float | None) -> None:
        self.audited = None
        self.caller = None
        self.deadline = deadline
        self.method = ""
        self.trace = None

    @property
    def peer(self) -> str:
        """The address of the caller, as the transport writes it; empty outside of a server."""
        return ""

    def message_done(self) -> None:
        """Say that the oldest message of the call's requests is no longer in memory, which makes room for others."""

    def caller_key(self) -> str:
        """Return what tells the caller from others: its name, else the address and the port of its connection."""
        return self.peer if self.caller is None else self.caller.name


@dataclass(frozen=True, kw_only=True)
class CoalescingOptions:
    """How long simultaneous requests wait for each other.

    Attributes:
        loop_turns: The most event-loop iterations to wait while the transport passes on simultaneous requests.
        examples: Dispatch immediately at this many examples.
    """

    loop_turns: int
    examples: int


NO_COALESCING = CoalescingOptions(loop_turns=0, examples=0)


Answer = Callable[[Any, CallContext], Awaitable[Any]]
"""Takes a request, or an iterator of requests, and returns the response."""
Stream = Callable[[Any, CallContext], AsyncGenerator[Any, None]]
"""Takes a request, or an iterator of requests, and yields responses."""
Requests = AsyncIterator[Any]
Admission = Callable[[CallContext], None]
"""Raises if a call would be refused whatever its request is; called before the request is parsed."""


Encoded = bytes | Callable[[], bytes]
"""The bytes of a response, or what builds them, on another thread as it takes long."""


def at_once(encoded: Encoded) -> bytes:
    """Return the bytes of a response, built here if that is still to do."""
    return encoded if isinstance(encoded, bytes) else encoded()


class Codec(Protocol[_Request_co, _Response_contra]):
    """Converts between the bytes of a method's messages and what its handler takes and returns."""

    def decode(self, data: bytes, begin: int = 0) -> _Request_co:
        """Return the request in ``data[begin:]``.

        Raises:
            DecodeError: The bytes cannot be parsed.
        """

    def encode(self, response: _Response_contra) -> Encoded:
        """Return the bytes of a response."""


class MessageCodec:
    """The codec of a method whose handler takes and returns the messages themselves.

    Args:
        request_type: The class of the request messages.
    """

    def __init__(self, request_type: Any) -> None:
        self._request_type = request_type

    def decode(self, data: bytes, begin: int = 0) -> Any:
        """See `Codec`."""
        return parse(self._request_type, data, begin)

    def encode(self, response: Message) -> bytes:
        """See `Codec`."""
        return response.SerializeToString()


class ZeroCopyCodec(MessageCodec):
    """The codec of a method whose handler takes a large message as a `ZeroCopyMessage`."""

    def decode(self, data: bytes, begin: int = 0) -> Any:
        """See `Codec`."""
        parsed = parse_zero_copy(self._request_type, data, begin)
        return parsed if parsed.contents else parsed.message


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method.

    Attributes:
        rpc: Its names and kind.
        access: The groups of which its callers need one.
        codec: Converts its messages.
        answer: Its handler: an `Answer`, or a `Stream` if ``rpc.streams_responses``.
        admit: The admission check of its calls, if any.
        patience_seconds: How long a caller may take none of its responses, after which the call ends, or None.
    """

    rpc: RpcMethod
    access: Access
    codec: Codec[Any, Any]
    answer: Answer | Stream
    admit: Admission | None = None
    patience_seconds: float | None = None

    def denial(self, caller: Caller) -> str:
        """Return the sentence for a caller that is in none of the groups."""
        groups = sorted(self.access)
        needed = f"the group {groups[0]}" if len(groups) == 1 else f"one of the groups {', '.join(groups)}"
        return f"{caller.name} may not call {self.rpc.name}, as it is not in {needed}; ask the operator for it"


@dataclass(frozen=True)
class Handler:
    """What serves one method: a row in the table of a service.

    Attributes:
        access: The groups of which its callers need one.
        answer: An `Answer`, or a `Stream` if the method streams responses.
        admit: The admission check of its calls, if any.
        codec: Converts its messages; None if ``answer`` takes and returns the messages themselves.
        patience_seconds: See `Method`.
    """

    access: Access
    answer: Answer | Stream
    _: KW_ONLY
    admit: Admission | None = None
    patience_seconds: float | None = None
    codec: Codec[Any, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Service:
    """One service.

    Attributes:
        name: Its full name, such as ``package.Service``.
        methods: Its methods.
    """

    name: str
    methods: tuple[Method, ...]


def service(descriptor: ServiceDescriptor, handlers: Mapping[str, Handler]) -> Service:
    """Return a service of this project, which has a handler for every method.

    Args:
        descriptor: The service.
        handlers: The handlers of its methods, by name.

    Raises:
        ValueError: A handler is missing or superfluous.
    """
    if handlers.keys() != set(descriptor.methods_by_name):
        raise ValueError(
            f"{descriptor.full_name} has the methods {sorted(descriptor.methods_by_name)}; there are handlers for "
            f"{sorted(handlers)}"
        )
    return foreign_service(descriptor, handlers)


def foreign_service(descriptor: ServiceDescriptor, handlers: Mapping[str, Handler]) -> Service:
    """Return a service of another project, whose methods depend on the installed version of its package.

    A method without a handler is left out, and every front end returns UNIMPLEMENTED for it. A handler of a method that
    the installed version lacks is left out too.

    Args:
        descriptor: The service.
        handlers: The handlers of its methods, by name.
    """
    descriptors: dict[str, MethodDescriptor] = dict(descriptor.methods_by_name)
    methods = tuple(
        Method(
            rpc=rpc,
            access=handler.access,
            codec=handler.codec or MessageCodec(GetMessageClass(descriptors[rpc.name].input_type)),
            answer=handler.answer,
            admit=handler.admit,
            patience_seconds=handler.patience_seconds,
        )
        for rpc in methods_of(descriptor)
        if (handler := handlers.get(rpc.name)) is not None
    )
    return Service(name=descriptor.full_name, methods=methods)


def refusals(sentences: Mapping[str, str], access: Access) -> dict[str, Handler]:
    """Return a handler that refuses, for each unsupported method.

    Args:
        sentences: What to do instead, by method name.
        access: The groups of which the callers need one.
    """
    return {name: Handler(access, _refusal(sentence)) for name, sentence in sentences.items()}


def _refusal(sentence: str) -> Answer:
    async def refuse(_request: Any, _call: CallContext) -> Any:
        raise UnsupportedError(sentence)

    return refuse
