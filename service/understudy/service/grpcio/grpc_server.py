"""Assembles the grpc.aio servers: their port, services, and how they end."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
from prometheus_client import CollectorRegistry

from understudy.service.grpcio.method_handlers import Handlers
from understudy.service.handlers.predictor import CoalescingOptions
from understudy.service.handlers.request_handlers import RequestHandlers
from understudy.service.metrics.rpc import RpcMetrics
from understudy.service.ports import reserve
from understudy.service.readiness import Readiness
from understudy.service.service_errors import grpc_port_in_use
from understudy.service.services import all_services

MIN_PING_SECONDS = 10
"""How often a client may ask whether a quiet connection stands. gRPC's own 300 s would cut off watchers that do."""


SERVERS = 8
"""How many servers share the port and the event loop. Each takes one call out of gRPC's core at a time, a turn of the
loop for each; with several, the calls of several connections come in one turn, and so do their replies."""


class GrpcServer:
    """The grpcio front end. Belongs to the event loop that it was made on.

    Args:
        registry: Where to register the ``grpc_server_*`` metrics.
        readiness: What health tells.
        max_message_bytes: The largest message to take or send.
    """

    coalescing: Final = CoalescingOptions(loop_turns=16, examples=128)
    """A call goes through four events of gRPC's core, each a turn or two after the one before."""

    def __init__(self, *, registry: CollectorRegistry, readiness: Readiness, max_message_bytes: int) -> None:
        self._readiness = readiness
        self._metrics = RpcMetrics(registry)
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 1),  # among the servers of this process; `reserve` keeps others away
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_SECONDS * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
        )
        self._servers = [grpc.aio.server(options=options) for _ in range(SERVERS)]

    def bind(self, host: str, port: int) -> int:
        """Take a port, any free one for 0, and return it.

        Raises:
            PortInUseError: It cannot be had.
        """
        with reserve(host, port) as reserved:
            port = reserved.getsockname()[1]
            try:
                for server in self._servers:
                    server.add_insecure_port(f"{_bracketed(host)}:{port}")
            except RuntimeError as error:
                raise grpc_port_in_use(host, port) from error
        return port

    async def start(self, handlers: RequestHandlers) -> None:
        """Begin to answer."""
        services = all_services(handlers, self._readiness)
        self._metrics.add(method.rpc for service in services for method in service.methods)
        method_handlers = Handlers(services, self._metrics)
        for server in self._servers:
            server.add_generic_rpc_handlers((method_handlers,))
            await server.start()

    async def drain(self, seconds: float) -> None:
        """Refuse new calls and let those under way finish; cut off what is left when the time is up.

        Streams without an end of their own end when the service's readiness says that it drains.
        """
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
