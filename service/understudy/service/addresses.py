"""The addresses of the service: binds its ports, and publishes them to other programs on this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from understudy.service.service_errors import SettingsError, grpc_port_in_use


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


def write_address_file(file: Path, addresses: str, *, tls: bool = False) -> None:
    """Write ``grpc=HOST:PORT http=HOST:PORT``, with TLS followed by `` tls``, and a newline; the write is atomic.

    Raises:
        SettingsError: The file cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(f"{addresses}{' tls' if tls else ''}\n", encoding="ascii")
        unfinished.replace(file)
    except OSError as error:
        raise SettingsError(
            f"address_file {file} cannot be written ({error.strerror}); give a file in a folder that can be written to"
        ) from error
