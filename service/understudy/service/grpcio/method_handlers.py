"""The method lookup for grpc."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import grpc

from understudy.service.grpcio.grpc_endpoint import ENDPOINTS
from understudy.service.methods import Method, Service
from understudy.service.metrics.rpc import RpcMetrics, RpcType

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
