"""The ASGI application, and an endpoint for each method: each serves a call from its headers to its trailers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.body_budget import BodyBudget, BodyReservation, StreamReservation
from understudy.service.calls.call_limits import DisconnectMonitor
from understudy.service.calls.compression import MessageDecompressor
from understudy.service.calls.served_call import ServedMethod, ServedMethods, accept_id, built
from understudy.service.calls.status import CallEndedError, Code, Failure, sentence
from understudy.service.envoy.asgi_call import AsgiCall, CallerGoneError, Receive, Reply, Scope, Send, refuse_media_type
from understudy.service.envoy.grpc_wire import PREFIX_BYTES, Message, Unframer, is_grpc, is_whole
from understudy.service.readiness import ReadinessState

BODY_IDLE_SECONDS = 30.0
"""The longest wait for the next chunk of an unfinished body of one message."""


class Endpoint(ABC):
    """Serves the calls of one method.

    Args:
        served: The method.
        monitor: Watches the running calls.
        max_message_bytes: The largest message to receive or send.
        bodies: Bounds the memory of unfinished bodies.
        decompressor: Decompresses messages.
    """

    def __init__(
        self,
        served: ServedMethod,
        monitor: DisconnectMonitor,
        max_message_bytes: int,
        bodies: BodyBudget,
        decompressor: MessageDecompressor,
    ) -> None:
        self._served = served
        self._handle: Any = served.method.answer
        self._encode = served.encode
        self._path = served.method.rpc.path
        self._monitor = monitor
        self._max_bytes = max_message_bytes
        self._bodies = bodies
        self._decompressor = decompressor

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Serve a call as an ASGI application."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not is_grpc(scope["method"], headers):
            return refuse_media_type(send)
        call = AsgiCall(scope, headers, receive, send, monitor=self._monitor, max_message_bytes=self._max_bytes)
        return self._served.serve(call, self._answer)

    @abstractmethod
    async def _answer(self, call: AsgiCall) -> None:
        """Read the request, call the handler and send the response."""

    async def _one_request(self, call: AsgiCall) -> Any:
        """Read the single message of a call, before the call may be cancelled."""
        chunk = await call.first_chunk()
        data, begin = chunk, PREFIX_BYTES
        if not (call.body_ended and is_whole(chunk, max_bytes=self._max_bytes)):
            data, begin = await self._collected(call, chunk), 0
        call.allow_cancelling()
        return self._served.decode(call, data, begin)

    async def _collected(self, call: AsgiCall, chunk: bytes | None) -> bytes:
        """Return the single message of a body; fail as soon as a second one begins."""
        unframer = Unframer(call.encoding, max_bytes=self._max_bytes)
        found: Message | None = None
        size = 0
        with BodyReservation(self._bodies, call.usage) as reservation:
            while chunk is not None:
                size += len(chunk)
                reservation.hold(size)
                unframer.feed(chunk)
                if found is None:
                    found = await _next_of(unframer)
                if found is not None and unframer.has_more:
                    raise InvalidInputError(f"got more than one message; {self._path} takes one")
                chunk = await _next_in_time(call, size)
        unframer.check_end()
        if found is None:
            raise InvalidInputError(f"got no message; {self._path} takes one")
        return await self._plain(found)

    async def _each_request(self, call: AsgiCall) -> AsyncIterator[Any]:
        """Yield every message; read the next chunk only when it is needed."""
        unframer = Unframer(call.encoding, max_bytes=self._max_bytes)
        decode = self._served.decode
        call.held = held = StreamReservation(self._bodies)
        while (chunk := await call.chunk_or_cancelled()) is not None:
            size = unframer.unread_bytes + len(chunk)
            await held.arrive(size)
            if call.usage is not None:
                call.usage.hold_unfinished(size)
            unframer.feed(chunk)
            del chunk
            while (message := await _next_of(unframer)) is not None:
                held.complete(len(message.data), unfinished=unframer.unread_bytes)
                if call.usage is not None:
                    call.usage.hold_unfinished(unframer.unread_bytes)
                    await call.usage.throttle()
                received = [await self._plain(message)]
                del message
                await held.grow(len(received[0]))
                yield decode(call, received.pop())  # nothing here keeps it while the next one is not asked for
            await held.expect(unframer.next_bytes)
        unframer.check_end()

    async def _plain(self, message: Message) -> bytes:
        return await self._decompressor.decompress(message.data) if message.is_compressed else message.data

    async def _send_each(self, request: Any, call: AsgiCall) -> None:
        reply = call.reply
        async with aclosing(self._handle(request, call)) as responses:
            async for response in responses:
                await self._served.send(call, reply.message(await built(self._encode(response))))
        await reply.end()


async def _next_of(unframer: Unframer) -> Message | None:
    return await asyncio.to_thread(unframer.next) if unframer.has_large else unframer.next()


async def _next_in_time(call: AsgiCall, size: int) -> bytes | None:
    """Return the next chunk of a body of one message, or None at the end; its beginning holds memory meanwhile."""
    try:
        async with asyncio.timeout(BODY_IDLE_SECONDS):
            return await call.next_chunk()
    except TimeoutError:
        message = f"the request is unfinished after {size} bytes; each piece may take {BODY_IDLE_SECONDS:g} s"
        raise CallEndedError(Failure(code=Code.DEADLINE_EXCEEDED, message=message)) from None


class UnaryEndpoint(Endpoint):
    """One request, one response."""

    async def _answer(self, call: AsgiCall) -> None:
        response = await self._handle(await self._one_request(call), call)
        call.task = None  # do not interrupt the sending
        await call.reply.only(await built(self._encode(response)))
        self._served.sent(call)


class ClientStreamEndpoint(Endpoint):
    """Any number of requests, one response."""

    async def _answer(self, call: AsgiCall) -> None:
        call.allow_cancelling()
        response = await self._handle(self._each_request(call), call)
        await call.reply.only(await built(self._encode(response)))
        self._served.sent(call)


class ServerStreamEndpoint(Endpoint):
    """One request, any number of responses."""

    async def _answer(self, call: AsgiCall) -> None:
        await self._send_each(await self._one_request(call), call)


class BidiStreamEndpoint(Endpoint):
    """Any number of requests, any number of responses."""

    async def _answer(self, call: AsgiCall) -> None:
        call.allow_cancelling()
        await self._send_each(self._each_request(call), call)


_ENDPOINTS: Final[Mapping[str, type[Endpoint]]] = {
    "unary": UnaryEndpoint,
    "client_stream": ClientStreamEndpoint,
    "server_stream": ServerStreamEndpoint,
    "bidi_stream": BidiStreamEndpoint,
}
"""The endpoint for each kind of method."""


class GrpcAsgiApp:
    """Serves every call on the port. Belongs to the event loop's thread.

    Args:
        methods: The methods to serve.
        monitor: Watches the running calls.
        max_message_bytes: The largest message to receive or send.
        max_body_bytes: The most bytes that all unfinished bodies together may hold.
    """

    def __init__(
        self, methods: ServedMethods, monitor: DisconnectMonitor, max_message_bytes: int, *, max_body_bytes: int
    ) -> None:
        bodies, decompressor = BodyBudget(max_body_bytes), MessageDecompressor(max_message_bytes)
        self._endpoints = {
            path: _ENDPOINTS[served.method.rpc.rpc_type](served, monitor, max_message_bytes, bodies, decompressor)
            for path, served in methods.items()
        }
        self._max_bytes = max_message_bytes
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
            failure = Failure(code=Code.UNIMPLEMENTED, message=sentence(message))
        with suppress(CallerGoneError):
            await Reply(send, accept_id(None), self._max_bytes, is_callers=False).end(failure)
