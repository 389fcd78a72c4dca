"""The ASGI application, and an endpoint for each method: each serves a call from its headers to its trailers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.call import REQUEST_ID, CallContext, accept_id, call_ended
from understudy.service.calls.call_monitor import DisconnectMonitor
from understudy.service.calls.methods import Method, Service
from understudy.service.calls.status import Code, Failure, failure_of
from understudy.service.envoy.asgi_call import Body, Receive, Reply, Scope, Send, refuse_media_type
from understudy.service.envoy.grpc_wire import (
    PREFIX_BYTES,
    REQUEST_ID_BYTES,
    CallEndedError,
    CallerGoneError,
    Unframer,
    is_grpc,
    is_whole,
    seconds_of,
)
from understudy.service.metrics.rpc_metrics import MethodMetrics, RpcMetrics
from understudy.service.readiness import ReadinessState

_SENTENCES: Final[Mapping[Code, str]] = {
    Code.CANCELLED: "the caller went away",
    Code.DEADLINE_EXCEEDED: "the deadline passed before there was an answer",
    Code.UNAVAILABLE: "the server ended before there was an answer",
}
"""Status messages of calls that are ended from outside."""


class Call(Body):
    """A running call and its body; see `WatchedCall`."""

    __slots__ = ("_loop", "deadline", "ending", "started", "task")

    def __init__(self, receive: Receive, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(receive)
        self._loop = loop
        self.started = time.monotonic()
        self.deadline: float | None = None
        self.task: asyncio.Task[Any] | None = None
        self.ending: Failure | None = None

    def end(self, code: Code) -> None:
        """See `WatchedCall`."""
        if self.ending is None:
            self.ending = Failure(code=code, message=_SENTENCES[code])
            if self.task is not None:
                self.task.cancel()

    def gone(self) -> None:
        """See `Body`."""
        self.end(Code.CANCELLED)

    def may_be_cancelled(self) -> None:
        """Allow the running task to be cancelled from now on to end the call.

        Raises:
            CallEndedError: The call has already been ended.
        """
        if self.ending is not None:
            raise CallEndedError(self.ending.code, self.ending.message)
        self.task = asyncio.current_task(self._loop)

    async def chunk_or_cancelled(self) -> bytes | None:
        """Return the next chunk of the body, or None at the end; if the caller has gone, wait to be cancelled."""
        try:
            return await self.next_chunk()
        except CallerGoneError:
            self.gone()
            await asyncio.Event().wait()
            raise

    def why_cancelled(self) -> Failure:
        """Return why the running task was cancelled; raise CancelledError if it was not to end the call."""
        task = asyncio.current_task()
        if self.ending is not None:
            if task is not None:
                task.uncancel()
            return self.ending
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return Failure(code=Code.CANCELLED, message="the computation was cancelled")


@dataclass(frozen=True, kw_only=True)
class EndpointContext:
    """The state that all endpoints share.

    Attributes:
        monitor: Watches the running calls.
        max_message_bytes: The largest message to receive or send.
    """

    monitor: DisconnectMonitor
    max_message_bytes: int


class Endpoint(ABC):
    """Serves the calls of one method.

    Args:
        method: The method.
        metrics: Counts and times its calls.
        endpoint_context: The state that all endpoints share.
    """

    def __init__(self, method: Method, metrics: MethodMetrics, endpoint_context: EndpointContext) -> None:
        self._path = method.rpc.path
        self._parse = method.parse
        self._method_answer: Any = method.answer
        self._admit = method.admit
        self._metrics = metrics
        self._monitor = endpoint_context.monitor
        self._max_bytes = endpoint_context.max_message_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call as an ASGI application."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not is_grpc(scope["method"], headers):
            await refuse_media_type(send)
            return
        came = headers.get(REQUEST_ID_BYTES)
        identifier = accept_id(None if came is None else came.decode("latin-1"))
        REQUEST_ID.set(identifier)
        call = Call(receive, self._monitor.loop)
        reply = Reply(send, identifier, self._max_bytes, is_callers=came is not None)
        metrics = self._metrics
        metrics.started()
        self._monitor.enter(call)
        failure: Failure | None = None
        try:
            timeout = headers.get(b"grpc-timeout")
            if timeout is not None:
                call.deadline = call.started + seconds_of(timeout)
            await self._answer(call, headers.get(b"grpc-encoding"), reply)
        except asyncio.CancelledError:
            failure = call.why_cancelled()
        except CallerGoneError:
            failure = Failure(code=Code.CANCELLED, message=_SENTENCES[Code.CANCELLED])
        except CallEndedError as error:
            failure = error.failure
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            failure = failure_of(error)
        finally:
            call.task = None
            self._monitor.leave(call)
        if failure is not None:
            with suppress(CallerGoneError):
                await reply.end(failure)
        self._end(call, failure)

    @abstractmethod
    async def _answer(self, call: Call, encoding: bytes | None, reply: Reply) -> None:
        """Read the request, call the handler and send the response."""

    def _end(self, call: Call, failure: Failure | None) -> None:
        code, message = (Code.OK, "") if failure is None else (failure.code, failure.message)
        seconds = time.monotonic() - call.started
        self._metrics.handled(code, seconds=seconds)
        call_ended(self._path, code, message=message, seconds=seconds)

    async def _one_request(self, call: Call, encoding: bytes | None) -> Any:
        """Read the single message of a call, before the call may be cancelled."""
        chunk = await call.first_chunk()
        data, begin = chunk, PREFIX_BYTES
        if not (call.body_ended and is_whole(chunk, max_bytes=self._max_bytes)):
            if self._admit is not None:
                self._admit(CallContext(deadline=call.deadline))  # before the rest of the body arrives
            data, begin = await self._collected(call, chunk, encoding), 0
        self._metrics.received()
        call.may_be_cancelled()
        return self._parse(data, begin)

    async def _collected(self, call: Call, chunk: bytes | None, encoding: bytes | None) -> bytes:
        """Return the single message of a body; fail as soon as a second one begins."""
        unframer = Unframer(encoding, max_bytes=self._max_bytes)
        found: bytes | None = None
        while chunk is not None:
            unframer.feed(chunk)
            if found is None:
                found = unframer.next()
            if found is not None and unframer.has_more:
                raise InvalidInputError(f"got more than one message; {self._path} takes one")
            chunk = await call.next_chunk()
        unframer.check_end()
        if found is None:
            raise InvalidInputError(f"got no message; {self._path} takes one")
        return found

    async def _each_request(self, call: Call, encoding: bytes | None) -> AsyncIterator[Any]:
        """Yield every message; read the next chunk only when it is needed."""
        unframer = Unframer(encoding, max_bytes=self._max_bytes)
        while (chunk := await call.chunk_or_cancelled()) is not None:
            unframer.feed(chunk)
            while (data := unframer.next()) is not None:
                self._metrics.received()
                yield self._parse(data)
        unframer.check_end()


class UnaryEndpoint(Endpoint):
    """One request, one response."""

    async def _answer(self, call: Call, encoding: bytes | None, reply: Reply) -> None:
        request = await self._one_request(call, encoding)
        response = await self._method_answer(request, CallContext(deadline=call.deadline))
        call.task = None  # do not interrupt the sending
        await reply.only(response.SerializeToString())
        self._metrics.sent()


class ClientStreamEndpoint(Endpoint):
    """Any number of requests, one response."""

    async def _answer(self, call: Call, encoding: bytes | None, reply: Reply) -> None:
        call.may_be_cancelled()
        requests = self._each_request(call, encoding)
        response = await self._method_answer(requests, CallContext(deadline=call.deadline))
        await reply.only(response.SerializeToString())
        self._metrics.sent()


class ServerStreamEndpoint(Endpoint):
    """One request, any number of responses."""

    async def _answer(self, call: Call, encoding: bytes | None, reply: Reply) -> None:
        request = await self._one_request(call, encoding)
        await self._send_each(request, call, reply)

    async def _send_each(self, request: Any, call: Call, reply: Reply) -> None:
        async with aclosing(self._method_answer(request, CallContext(deadline=call.deadline))) as responses:
            async for response in responses:
                await reply.message(response.SerializeToString())
                self._metrics.sent()
        await reply.end()


class BidiStreamEndpoint(ServerStreamEndpoint):
    """Any number of requests, any number of responses."""

    async def _answer(self, call: Call, encoding: bytes | None, reply: Reply) -> None:
        call.may_be_cancelled()
        await self._send_each(self._each_request(call, encoding), call, reply)


ENDPOINTS: Final[Mapping[str, type[Endpoint]]] = {
    "unary": UnaryEndpoint,
    "client_stream": ClientStreamEndpoint,
    "server_stream": ServerStreamEndpoint,
    "bidi_stream": BidiStreamEndpoint,
}
"""The endpoint for each kind of method."""


class GrpcAsgiApp:
    """Serves every call on the port. Belongs to the event loop's thread.

    Args:
        services: The services to serve.
        metrics: The series of all their methods.
        endpoint_context: The state that all endpoints share.
    """

    def __init__(self, services: Iterable[Service], metrics: RpcMetrics, endpoint_context: EndpointContext) -> None:
        self._endpoints = {
            method.rpc.path: ENDPOINTS[method.rpc.rpc_type](method, metrics.of(method.rpc.path), endpoint_context)
            for service in services
            for method in service.methods
        }
        self._max_bytes = endpoint_context.max_message_bytes
        self._draining = False

    def start_draining(self) -> None:
        """Refuse every call from now on."""
        self._draining = True

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Serve a call as an ASGI application."""
        endpoint = None if self._draining else self._endpoints.get(scope["path"])
        return self._refuse(scope, send) if endpoint is None else endpoint(scope, receive, send)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        if not is_grpc(scope["method"], dict(scope["headers"])):
            await refuse_media_type(send)
            return
        failure = Failure(code=Code.UNAVAILABLE, message=ReadinessState.DRAINING.value)
        if not self._draining:
            message = f"there is no method {scope['path']}; server reflection lists the methods"
            failure = Failure(code=Code.UNIMPLEMENTED, message=message)
        with suppress(CallerGoneError):
            await Reply(send, accept_id(None), self._max_bytes, is_callers=False).end(failure)
