"""grpc's handlers for the methods of a service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from understudy.service.dataplane.call import CallContext
from understudy.service.grpcio.interceptors.base import Context, Handler
from understudy.service.methods import Method, Service
from understudy.service.metrics.rpc import RpcType


def generic_handler(service: Service) -> grpc.GenericRpcHandler[Any, Any]:
    """Return what a server registers for a service."""
    handlers = {method.rpc.name: _handler(method) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.name, handlers)


def _handler(method: Method) -> Handler:
    make: Any = getattr(grpc, f"{_KINDS[method.rpc.rpc_type]}_rpc_method_handler")
    behavior = _streaming(method) if method.rpc.streams_responses else _answering(method)
    handler: Handler = make(behavior, response_serializer=_serialize)
    return handler


_KINDS: Mapping[RpcType, str] = {
    "unary": "unary_unary",
    "client_stream": "stream_unary",
    "server_stream": "unary_stream",
    "bidi_stream": "stream_stream",
}


def _answering(method: Method) -> Any:
    parse = _parser(method)

    async def answer(data: Any, context: Context) -> Any:
        response: Any = method.answer(parse(data), call_context(context))
        return await response

    return answer


def _streaming(method: Method) -> Any:
    parse = _parser(method)

    async def stream(data: Any, context: Context) -> AsyncGenerator[Any, None]:
        responses: Any = method.answer(parse(data), call_context(context))
        async with aclosing(responses):
            async for response in responses:
                yield response

    return stream


def _parser(method: Method) -> Callable[[Any], Any]:
    """Return what parses inside the call, so that bytes that are no message are the caller's error."""

    async def parse_each(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield method.parse(data)

    return parse_each if method.rpc.streams_requests else method.parse


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def call_context(context: Context) -> CallContext:
    """Return what the data plane knows about a call."""
    remaining: Any = context.time_remaining()
    return CallContext.with_time_remaining(remaining)
