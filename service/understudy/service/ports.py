"""Ports that several listeners of one process share, and no other process."""

from __future__ import annotations

import socket
from typing import Any

from understudy.service.service_errors import grpc_port_in_use


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that keeps a port for this process without listening on it, any free one for 0.

    Raises:
        PortInUseError: The port cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:  # one that shares with nobody finds out whether somebody is there
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = probe.getsockname()
        return _kept(family, address)
    except OSError as error:
        raise grpc_port_in_use(host, port) from error


def _kept(family: int, address: Any) -> socket.socket:
    """Return a socket that this process may share, and others only if an earlier server's connections linger."""
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
