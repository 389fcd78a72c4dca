"""The endpoints, and what every call has: an id, counts, a log line, and a status."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final

import grpc

from understudy.service import request_id
from understudy.service.access_log import call_ended
from understudy.service.grpcio.status import Context, abort, code_of, code_when_cancelled, message_of
from understudy.service.handlers.call import CallContext
from understudy.service.handlers.failures import failure_of
from understudy.service.methods import Method
from understudy.service.metrics.rpc import MethodMetrics, RpcType

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
    came = next((value for key, value in context.invocation_metadata() or () if key == request_id.HEADER), None)
    identifier = request_id.accept(came)
    request_id.current.set(identifier)
    if came is not None:
        context.set_trailing_metadata(((request_id.HEADER, identifier),))
