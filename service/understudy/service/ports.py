"""Ports that several listeners of one process share, but not with other processes."""

from __future__ import annotations

import socket
from typing import Any

from understudy.service.service_errors import grpc_port_in_use


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that reserves a port, or any free port for 0, for this process without listening on it.

    Raises:
        PortInUseError: The port is not available.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:  # without SO_REUSEPORT, to detect another listener
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = probe.getsockname()
        return _kept(family, address)
    except OSError as error:
        raise grpc_port_in_use(host, port) from error


def _kept(family: int, address: Any) -> socket.socket:
    """Return a socket with SO_REUSEPORT; with SO_REUSEADDR too only if an earlier server's connections linger."""
    try:
        return _bound(family, address, reuse_address=False)
    except OSError:
        return _bound(family, address, reuse_address=True)


def _bound(family: int, address: Any, *, reuse_address: bool) -> socket.socket:
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
