"""The envoy front end's implementation of `FrontEnd`."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from understudy.service.envoy.admin import Admin
from understudy.service.envoy.asgi_app import GrpcAsgiApp
from understudy.service.envoy.asgi_endpoint import EndpointContext
from understudy.service.envoy.disconnect_monitor import DisconnectMonitor
from understudy.service.envoy.host import Host
from understudy.service.handlers.predictor import CoalescingOptions
from understudy.service.handlers.request_handlers import RequestHandlers
from understudy.service.metrics.rpc import RpcMetrics
from understudy.service.readiness import Readiness
from understudy.service.services import all_services

_LIVE_SECONDS: Final = 30.0
_SEND_SECONDS: Final = 5.0


class EnvoyServer:
    """A front end, see `understudy.service.front_end.FrontEnd`. Belongs to the event loop on which it is created.

    Args:
        host: The Envoy in this process.
        registry: Where to register the ``grpc_server_*`` metrics.
        readiness: The state that health reports.
        max_message_bytes: The largest message to receive or send.
    """

    coalescing: Final = CoalescingOptions(loop_turns=24, examples=16)
    """Simultaneous calls arrive together, but their bodies are requested and arrive one by one."""

    def __init__(
        self, host: Host, *, registry: CollectorRegistry, readiness: Readiness, max_message_bytes: int
    ) -> None:
        self._host = host
        self._admin = Admin(host.launched.admin_socket)
        self._readiness = readiness
        self._metrics = RpcMetrics(registry)
        self._endpoint_context = EndpointContext(monitor=DisconnectMonitor(), max_message_bytes=max_message_bytes)
        self._app: GrpcAsgiApp | None = None

    def bind(self, host: str, port: int) -> int:
        """Return the port that was bound before this process became Envoy."""
        del host, port
        return self._host.launched.port

    async def start(self, handlers: RequestHandlers) -> None:
        """Start to serve calls, first those that have been waiting.

        Raises:
            FrontEndError: Envoy does not listen.
        """
        services = all_services(handlers, self._readiness)
        self._metrics.add(method.rpc for service in services for method in service.methods)
        await self._admin.until_live(_LIVE_SECONDS)
        self._app = GrpcAsgiApp(services, self._metrics, self._endpoint_context)
        self._host.open(self._app)

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, let running ones finish, and cancel the rest when the time is up."""
        if self._app is None:
            return
        self._app.start_draining()
        await self._admin.stop_listening()
        await self._endpoint_context.monitor.until_alone(seconds)
        await self._admin.until_sent(_SEND_SECONDS)
