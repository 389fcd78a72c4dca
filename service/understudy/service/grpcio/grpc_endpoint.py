"""The endpoints of the methods on grpc.aio, from bytes to bytes."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, cast

import grpc

from understudy.service.calls.metrics import RpcType
from understudy.service.calls.served_call import REQUEST_ID_HEADER, Call, ServedMethod, ServedMethods
from understudy.service.calls.status import (
    CALLER_GONE,
    COMPUTATION_CANCELLED,
    DEADLINE_PASSED,
    DETAILS_KEY,
    Code,
    Failure,
    status_details,
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


class GrpcCall(Call):
    """A call of grpc.aio, which enforces the deadline and cancels the task when the caller disconnects.

    Args:
        request: The request, or grpc's own iterator of requests.
        context: grpc's context of the call.
    """

    __slots__ = ("_cancelled", "context", "request")

    def __init__(self, request: Any, context: Context) -> None:
        self.context = context
        self.request = request
        self._cancelled = False
        super().__init__()

    @property
    def peer(self) -> str:
        """See `Call`."""
        return str(self.context.peer())

    def header(self, name: str) -> str | bytes | None:
        """See `Call`."""
        return next((value for key, value in self.context.invocation_metadata() or () if key == name), None)

    def open(self) -> None:
        """See `Call`."""
        remaining = self._seconds_remaining()
        self.deadline = None if remaining is None else time.monotonic() + remaining
        if self.has_callers_id:
            self.context.set_trailing_metadata(((REQUEST_ID_HEADER, self.request_id),))

    def close(self) -> None:
        """See `Call`."""

    def why_cancelled(self) -> Failure:
        """See `Call`."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            return COMPUTATION_CANCELLED
        self._cancelled = True
        remaining = self._seconds_remaining()
        return DEADLINE_PASSED if remaining is not None and remaining <= 0 else CALLER_GONE

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

    def _seconds_remaining(self) -> float | None:
        return cast("float | None", self.context.time_remaining())


class Endpoint(ABC):
    """Serves the calls of one method, from bytes to bytes.

    Args:
        served: The method.
    """

    def __init__(self, served: ServedMethod) -> None:
        self._served = served
        self._handle: Any = served.method.answer
        self._encode = served.encode

    async def call(self, request: Any, context: Context) -> bytes | None:
        """Serve a call; grpc calls this function.

        Args:
            request: The request, or grpc's own iterator of requests.
            context: The call.

        Returns:
            The response, or None if responses have been written.
        """
        return await self._served.serve(GrpcCall(request, context), self._answer)

    @abstractmethod
    async def _answer(self, call: GrpcCall) -> bytes | None:
        """Call the handler; return its response, or write its responses."""

    async def _each_request(self, call: GrpcCall) -> AsyncIterator[Any]:
        read, decode = call.context.read, self._served.decode
        while (data := await read()) is not _EOF:
            yield decode(call, cast("bytes", data))

    async def _send_each(self, requests: Any, call: GrpcCall) -> None:
        write, encode, sent = call.context.write, self._encode, self._served.sent
        async with aclosing(self._handle(requests, call)) as responses:
            async for response in responses:
                await write(encode(response))
                sent()


class UnaryEndpoint(Endpoint):
    """One request, one response."""

    async def _answer(self, call: GrpcCall) -> bytes:
        response = await self._handle(self._served.decode(call, call.request), call)
        data = self._encode(response)
        self._served.sent()
        return data


class ClientStreamEndpoint(Endpoint):
    """Any number of requests, one response."""

    async def _answer(self, call: GrpcCall) -> bytes:
        response = await self._handle(self._each_request(call), call)
        data = self._encode(response)
        self._served.sent()
        return data


class ServerStreamEndpoint(Endpoint):
    """One request, any number of responses."""

    async def _answer(self, call: GrpcCall) -> None:
        await self._send_each(self._served.decode(call, call.request), call)


class BidiStreamEndpoint(Endpoint):
    """Any number of requests, any number of responses."""

    async def _answer(self, call: GrpcCall) -> None:
        await self._send_each(self._each_request(call), call)


_KINDS: Final[Mapping[RpcType, tuple[type[Endpoint], Any]]] = {
    "unary": (UnaryEndpoint, grpc.unary_unary_rpc_method_handler),
    "client_stream": (ClientStreamEndpoint, grpc.stream_unary_rpc_method_handler),
    "server_stream": (ServerStreamEndpoint, grpc.unary_stream_rpc_method_handler),
    "bidi_stream": (BidiStreamEndpoint, grpc.stream_stream_rpc_method_handler),
}
"""For each kind of method its endpoint, and grpc's function for it."""


class MethodHandlers(GenericHandler):
    """The method lookup for grpc.

    Args:
        methods: The methods to serve.
    """

    def __init__(self, methods: ServedMethods) -> None:
        self._handlers = {path: _handler(served) for path, served in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> MethodHandler | None:
        """See `grpc.GenericRpcHandler`."""
        return self._handlers.get(handler_call_details.method)


def _handler(served: ServedMethod) -> MethodHandler:
    endpoint, make = _KINDS[served.method.rpc.rpc_type]
    handler: MethodHandler = make(endpoint(served).call)
    return handler
