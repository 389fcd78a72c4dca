"""The ASGI application: finds the endpoint of a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from understudy.service.dataplane.codes import Code
from understudy.service.dataplane.failures import Failure
from understudy.service.envoy.asgi import Receive, Scope, Send
from understudy.service.envoy.endpoint import ENDPOINTS, Surroundings
from understudy.service.envoy.headers import CONTENT_TYPE
from understudy.service.envoy.refusals import CallerGoneError
from understudy.service.envoy.reply import Reply
from understudy.service.methods import Service
from understudy.service.metrics.rpc import RpcMetrics
from understudy.service.readiness import ReadinessState
from understudy.service.request_id import accept

_UNSUPPORTED_MEDIA_TYPE: Final = 415
_NOT_GRPC: Final = b"this port speaks gRPC; the HTTP port answers everything else\n"


class Door:
    """Answers every call on the port. Belongs to the event loop's thread.

    Args:
        services: What there is to call.
        metrics: Has the series of all their methods.
        surroundings: What all endpoints share.
    """

    def __init__(self, services: Iterable[Service], metrics: RpcMetrics, surroundings: Surroundings) -> None:
        self._endpoints = {
            method.rpc.path: ENDPOINTS[method.rpc.rpc_type](method, metrics.of(method.rpc.path), surroundings)
            for service in services
            for method in service.methods
        }
        self._max_bytes = surroundings.max_message_bytes
        self._draining = False

    def start_draining(self) -> None:
        """Refuse every call from now on."""
        self._draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call. An ASGI application."""
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is not None and not self._draining and _is_grpc(scope):
            await endpoint(scope, receive, send)
        elif not _is_grpc(scope):
            await _refuse_media_type(send)
        elif self._draining:
            await self._fail(send, Failure(code=Code.UNAVAILABLE, message=ReadinessState.DRAINING.value))
        else:
            message = f"there is no method {scope['path']}; server reflection tells which there are"
            await self._fail(send, Failure(code=Code.UNIMPLEMENTED, message=message))

    async def _fail(self, send: Send, failure: Failure) -> None:
        reply = Reply(send, accept(None).encode(), self._max_bytes)
        try:
            await reply.end(failure)
        except CallerGoneError:
            return


def _is_grpc(scope: Scope) -> bool:
    if scope["method"] != "POST":
        return False
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bool(value.startswith(CONTENT_TYPE))
    return False


async def _refuse_media_type(send: Send) -> None:
    headers: Any = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(_NOT_GRPC))]
    await send({"type": "http.response.start", "status": _UNSUPPORTED_MEDIA_TYPE, "headers": headers})
    await send({"type": "http.response.body", "body": _NOT_GRPC, "more_body": False})
