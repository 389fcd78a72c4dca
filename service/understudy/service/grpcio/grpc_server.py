"""The grpcio front end: grpc.aio servers, their port, methods and shutdown."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Final, TypeVar

import grpc

from understudy.service.addresses import reserve
from understudy.service.calls.served_call import ServedMethods
from understudy.service.front_end import (
    HANDSHAKE_SECONDS,
    KEEPALIVE_SECONDS,
    KEEPALIVE_TIMEOUT_SECONDS,
    MAX_STREAMS,
    Main,
    hear_signals,
)
from understudy.service.grpcio.grpc_endpoint import MethodHandlers
from understudy.service.predictor import CoalescingOptions
from understudy.service.service_errors import grpc_port_in_use
from understudy.service.settings import ConnectionLimits, ServeSettings
from understudy.service.tls import Certificates, ServerCertificates

MIN_PING_SECONDS = 10
"""How often a client may ping an idle connection. gRPC's default of 300 s would disconnect watches that do."""


_T = TypeVar("_T")

SERVERS = 8
"""How many servers share the port and the event loop. Each server takes one call per loop iteration from gRPC's core;
with several, calls of several connections arrive in one iteration, and so do their responses."""


def run(settings: ServeSettings, main: Main[_T]) -> _T:
    """Run the service with this front end; see `understudy.service.front_end.RunFrontEnd`."""
    import uvloop  # each event of gRPC's core takes a loop iteration, so a faster loop matters

    return uvloop.run(main(partial(server_of, settings), hear_signals))


def server_of(settings: ServeSettings, certificates: ServerCertificates | None = None) -> GrpcServer:
    """Return the front end of these settings."""
    return GrpcServer(certificates, max_message_bytes=settings.max_message_bytes, connections=settings.connections)


class GrpcServer:
    """The grpcio front end. Belongs to the event loop on which it is created.

    Args:
        certificates: The certificates for TLS; None to serve without TLS.
        max_message_bytes: The largest message to receive or send.
        connections: The limits of its connections.
    """

    coalescing: Final = CoalescingOptions(loop_turns=16, examples=128)
    """A call takes four events of gRPC's core, one or two loop iterations apart."""

    def __init__(
        self, certificates: ServerCertificates | None = None, *, max_message_bytes: int, connections: ConnectionLimits
    ) -> None:
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 1),  # for the servers of this process; `reserve` keeps other processes out
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_SECONDS * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            *_connection_options(connections),
        )
        self._servers = [grpc.aio.server(options=options) for _ in range(SERVERS)]
        self._certificates = certificates

    def bind(self, host: str, port: int) -> int:
        """Bind a port, or any free port for 0, and return it.

        Raises:
            PortInUseError: The port is not available.
        """
        with reserve(host, port) as reserved:
            port = reserved.getsockname()[1]
            try:
                for server in self._servers:
                    self._listen(server, f"{_bracketed(host)}:{port}")
            except RuntimeError as error:
                raise grpc_port_in_use(host, port) from error
        return port

    def _listen(self, server: grpc.aio.Server, address: str) -> None:
        if self._certificates is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(self._certificates))

    async def start(self, methods: ServedMethods) -> None:
        """Start to serve calls of these methods."""
        method_handlers = MethodHandlers(methods)
        for server in self._servers:
            server.add_generic_rpc_handlers((method_handlers,))
            await server.start()

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, let running ones finish, and cancel the rest when the time is up.

        Endless streams end when the service's readiness changes to draining.
        """
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))


def _connection_options(connections: ConnectionLimits) -> list[tuple[str, int]]:
    """Return the channel arguments of each of the servers."""
    milliseconds = {
        "grpc.max_connection_idle_ms": connections.idle_seconds,
        "grpc.max_connection_age_ms": connections.age_seconds,  # gRPC's core adds the jitter
        "grpc.max_connection_age_grace_ms": connections.grace_seconds if connections.age_seconds else 0,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_SECONDS,
        "grpc.keepalive_time_ms": KEEPALIVE_SECONDS,
        "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_SECONDS,
    }
    return [
        *((name, round(seconds * 1000)) for name, seconds in milliseconds.items() if seconds),
        ("grpc.max_allowed_incoming_connections", math.ceil(connections.count / SERVERS)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]


def _credentials(certificates: ServerCertificates) -> grpc.ServerCredentials:
    """Return credentials for one server. gRPC asks for a change before each handshake, separately for each server."""
    used = certificates.current

    def change() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        current = certificates.current
        if current is used:
            return None
        used = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        change,  # type: ignore[arg-type]  # the stubs lack None, which means no change
        require_client_authentication=used.client_ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.certificate)], root_certificates=certificates.client_ca
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
