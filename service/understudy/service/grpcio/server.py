"""Assembles the grpc.aio server: ports, interceptors, services, and how it ends."""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry

from understudy.service.dataplane.planes import DataPlane
from understudy.service.errors import grpc_port_in_use
from understudy.service.grpcio.handlers import generic_handler
from understudy.service.grpcio.interceptors.access_log import AccessLogInterceptor
from understudy.service.grpcio.interceptors.errors import ErrorInterceptor
from understudy.service.grpcio.interceptors.metrics import MetricsInterceptor
from understudy.service.grpcio.interceptors.request_ids import RequestIdInterceptor
from understudy.service.metrics.rpc import RpcMetrics
from understudy.service.readiness import Readiness
from understudy.service.services import all_services

MIN_PING_SECONDS = 10
"""How often a client may ask whether a quiet connection stands. gRPC's own 300 s would cut off watchers that do."""


class GrpcServer:
    """The grpcio front end. Belongs to the event loop that it was made on.

    Args:
        registry: Where to register the ``grpc_server_*`` metrics.
        readiness: What health tells.
        max_message_bytes: The largest message to take or send.
    """

    def __init__(self, *, registry: CollectorRegistry, readiness: Readiness, max_message_bytes: int) -> None:
        self._readiness = readiness
        self._metrics = RpcMetrics(registry)
        self._server = grpc.aio.server(
            interceptors=(
                MetricsInterceptor(self._metrics),
                RequestIdInterceptor(),
                AccessLogInterceptor(),
                ErrorInterceptor(),
            ),
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", 0),  # else a second server on the same port would be let in silently
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_SECONDS * 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ),
        )

    def bind(self, host: str, port: int) -> int:
        """Take a port, any free one for 0, and return it.

        Raises:
            PortInUseError: It cannot be had.
        """
        try:
            return self._server.add_insecure_port(f"{_bracketed(host)}:{port}")
        except RuntimeError as error:
            raise grpc_port_in_use(host, port) from error

    async def start(self, plane: DataPlane) -> None:
        """Begin to answer."""
        services = all_services(plane, self._readiness)
        self._metrics.add(method.rpc for service in services for method in service.methods)
        self._server.add_generic_rpc_handlers([generic_handler(service) for service in services])
        await self._server.start()

    async def drain(self, seconds: float) -> None:
        """Refuse new calls and let those under way finish; cut off what is left when the time is up.

        Streams without an end of their own end when the service's readiness says that it drains.
        """
        await self._server.stop(seconds)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
