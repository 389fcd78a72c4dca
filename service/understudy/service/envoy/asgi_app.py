"""The ASGI application: dispatches calls to endpoints."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from understudy.service.envoy.asgi import Receive, Scope, Send
from understudy.service.envoy.asgi_endpoint import ENDPOINTS, EndpointContext
from understudy.service.envoy.headers import is_grpc
from understudy.service.envoy.refusals import CallerGoneError
from understudy.service.envoy.reply import Reply, refuse_media_type
from understudy.service.handlers.codes import Code
from understudy.service.handlers.failures import Failure
from understudy.service.methods import Service
from understudy.service.metrics.rpc import RpcMetrics
from understudy.service.readiness import ReadinessState
from understudy.service.request_id import accept


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
            await Reply(send, accept(None), self._max_bytes, is_callers=False).end(failure)
