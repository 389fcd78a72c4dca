"""The endpoints of the methods on grpc.aio, from bytes to bytes."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import grpc

from understudy.service.calls.call import REQUEST_ID, REQUEST_ID_HEADER, CallContext, accept_id, call_ended
from understudy.service.calls.methods import Method, Service
from understudy.service.calls.status import DETAILS_KEY, Code, Failure, failure_of, status_details
from understudy.service.metrics.rpc_metrics import MethodMetrics, RpcMetrics, RpcType

if TYPE_CHECKING:  # generic in the stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Context = grpc.aio.ServicerContext

GRPC_STATUS = {Code(status.value[0]): status for status in grpc.StatusCode}


async def abort(context: Context, failure: Failure) -> NoReturn:
    """End a call with a failure, its id, and ``google.rpc.RetryInfo`` if the time of a retry is known."""
    trailing: tuple[tuple[str, str | bytes], ...] = ((REQUEST_ID_HEADER, REQUEST_ID.get()),)
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


_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


class Endpoint(ABC):
    """Serves the calls of one method, from bytes to bytes.

    One function does all the work around a call, since each layer adds cost to every message of a stream.

    Args:
        method: The method.
        metrics: Counts and times its calls.
    """

    def __init__(self, method: Method, metrics: MethodMetrics) -> None:
        self._path = method.rpc.path
        self._parse = method.parse
        self._method_answer: Any = method.answer
        self._metrics = metrics

    async def call(self, came: Any, context: Context) -> bytes | None:
        """Serve a call; grpc calls this function.

        Args:
            came: The request, or grpc's own iterator of requests.
            context: The call.

        Returns:
            The response, or None if responses have been written.
        """
        started = time.perf_counter()
        cancelled = False
        self._metrics.started()
        _identify(context)
        try:
            return await self._answer_or_abort(came, context)
        except (asyncio.CancelledError, GeneratorExit):
            cancelled = True
            raise
        finally:
            code = code_when_cancelled(context) if cancelled else code_of(context)
            seconds = time.perf_counter() - started
            self._metrics.handled(code, seconds=seconds)
            call_ended(self._path, code, message=message_of(context), seconds=seconds)

    async def _answer_or_abort(self, came: Any, context: Context) -> bytes | None:
        try:
            return await self._answer(came, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            await abort(context, failure_of(error))

    @abstractmethod
    async def _answer(self, came: Any, context: Context) -> bytes | None:
        """See `call`."""

    def _one_request(self, data: bytes) -> Any:
        self._metrics.received()
        return self._parse(data)

    async def _each_request(self, context: Context) -> AsyncIterator[Any]:
        read, parse, received = context.read, self._parse, self._metrics.received
        while (data := await read()) is not _EOF:
            received()
            yield parse(data)

    async def _only(self, requests: Any, context: Context) -> bytes:
        response = await self._method_answer(requests, call_context(context))
        data: bytes = response.SerializeToString()
        self._metrics.sent()
        return data

    async def _send_each(self, requests: Any, context: Context) -> None:
        write, sent = context.write, self._metrics.sent
        async with aclosing(self._method_answer(requests, call_context(context))) as responses:
            async for response in responses:
                await write(response.SerializeToString())
                sent()


class UnaryEndpoint(Endpoint):
    """One request, one response."""

    async def _answer(self, came: bytes, context: Context) -> bytes:
        return await self._only(self._one_request(came), context)


class ClientStreamEndpoint(Endpoint):
    """Any number of requests, one response."""

    async def _answer(self, came: Any, context: Context) -> bytes:
        del came
        return await self._only(self._each_request(context), context)


class ServerStreamEndpoint(Endpoint):
    """One request, any number of responses."""

    async def _answer(self, came: bytes, context: Context) -> None:
        await self._send_each(self._one_request(came), context)


class BidiStreamEndpoint(Endpoint):
    """Any number of requests, any number of responses."""

    async def _answer(self, came: Any, context: Context) -> None:
        del came
        await self._send_each(self._each_request(context), context)


ENDPOINTS: Final[Mapping[RpcType, type[Endpoint]]] = {
    "unary": UnaryEndpoint,
    "client_stream": ClientStreamEndpoint,
    "server_stream": ServerStreamEndpoint,
    "bidi_stream": BidiStreamEndpoint,
}
"""The endpoint for each kind of method."""


def call_context(context: Context) -> CallContext:
    """Return the `CallContext` of a call."""
    remaining: Any = context.time_remaining()
    return CallContext.with_time_remaining(remaining)


def _identify(context: Context) -> None:
    """Set the call's id for the logs: the caller's ``x-request-id``, which the trailers repeat, or a new one."""
    came = next((value for key, value in context.invocation_metadata() or () if key == REQUEST_ID_HEADER), None)
    identifier = accept_id(came)
    REQUEST_ID.set(identifier)
    if came is not None:
        context.set_trailing_metadata(((REQUEST_ID_HEADER, identifier),))


if TYPE_CHECKING:  # generic in the stubs only
    Handler = grpc.RpcMethodHandler[Any, Any]
    GenericHandler = grpc.GenericRpcHandler[Any, Any]
else:
    Handler = grpc.RpcMethodHandler
    GenericHandler = grpc.GenericRpcHandler


class Handlers(GenericHandler):
    """The handlers of every method of several services.

    Args:
        services: The services to serve.
        metrics: The series of all their methods.
    """

    def __init__(self, services: Iterable[Service], metrics: RpcMetrics) -> None:
        self._handlers = {
            method.rpc.path: _handler(method, metrics) for service in services for method in service.methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """See `grpc.GenericRpcHandler`."""
        return self._handlers.get(handler_call_details.method)


_KINDS: Final[Mapping[RpcType, str]] = {
    "unary": "unary_unary",
    "client_stream": "stream_unary",
    "server_stream": "unary_stream",
    "bidi_stream": "stream_stream",
}


def _handler(method: Method, metrics: RpcMetrics) -> Handler:
    make: Any = getattr(grpc, f"{_KINDS[method.rpc.rpc_type]}_rpc_method_handler")
    handler: Handler = make(ENDPOINTS[method.rpc.rpc_type](method, metrics.of(method.rpc.path)).call)
    return handler
