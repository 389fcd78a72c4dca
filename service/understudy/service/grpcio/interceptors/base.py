"""What all interceptors share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:  # these are generic in the stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Context = grpc.aio.ServicerContext
    Handler = grpc.RpcMethodHandler
    ServerInterceptor = grpc.aio.ServerInterceptor

Answer = Callable[[Any, Context], Awaitable[Any]]
"""Takes a request, or an iterator of requests, and returns the response."""
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]
"""Takes a request, or an iterator of requests, and yields responses."""


class Interceptor(ServerInterceptor):
    """Runs code around every call. Methods are wrapped when they are first called, and never again."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    @abstractmethod
    def wrap(self, path: str, handler: Handler) -> Handler:
        """Return a handler that passes through this interceptor.

        Args:
            path: The method, such as ``/package.Service/Method``.
            handler: The rest of the chain.
        """

    async def intercept_service(  # type: ignore[override]  # the stubs forget unknown methods
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See `grpc.aio.ServerInterceptor`."""
        path = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if path not in self._wrapped:
            self._wrapped[path] = self.wrap(path, handler)
        return self._wrapped[path]


class AroundInterceptor(Interceptor):
    """Does something before and after every call, and never looks at its messages."""

    @abstractmethod
    def around(self, path: str, context: Context) -> AbstractContextManager[None]:
        """Return what to enter before a call of a method and to leave after it."""

    def wrap(self, path: str, handler: Handler) -> Handler:
        """See `Interceptor`."""

        def around_answer(proceed: Answer) -> Answer:
            async def answer(request: Any, context: Context) -> Any:
                with self.around(path, context):
                    return await proceed(request, context)

            return answer

        def around_stream(proceed: Stream) -> Stream:
            async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
                with self.around(path, context):
                    async with aclosing(proceed(request, context)) as responses:
                        async for response in responses:
                            yield response

            return stream

        return with_behavior(handler, answer=around_answer, stream=around_stream)


def with_behavior(
    handler: Handler, *, answer: Callable[[Answer], Answer], stream: Callable[[Stream], Stream]
) -> Handler:
    """Return a handler whose behavior is wrapped, whichever of the four kinds it is of."""
    wrapped = _Handler()
    wrapped.request_streaming = handler.request_streaming
    wrapped.response_streaming = handler.response_streaming
    wrapped.request_deserializer = handler.request_deserializer
    wrapped.response_serializer = handler.response_serializer
    kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
    around: Callable[[Any], Any] = stream if handler.response_streaming else answer
    setattr(wrapped, kind, around(getattr(handler, kind)))
    return wrapped


def _word(streaming: bool) -> str:  # noqa: FBT001 - it is the fact itself
    return "stream" if streaming else "unary"


class _Handler(Handler):
    """A handler whose parts can be set."""

    unary_unary = None
    unary_stream = None
    stream_unary = None
    stream_stream = None
