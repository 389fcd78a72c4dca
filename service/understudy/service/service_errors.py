"""The service's own exceptions, raised while it starts.

ServiceError
├── SettingsError                 a setting cannot be used
├── PortInUseError                another process listens where this one should
└── FrontEndError                 the front end does not start
"""

from __future__ import annotations


class ServiceError(Exception):
    """The root of what keeps the service from starting. Its text is meant for whoever started it."""


class SettingsError(ServiceError, ValueError):
    """A setting cannot be used. The text names it, what came and what was expected."""


class PortInUseError(ServiceError):
    """Another process listens where this one should. The text names the address and the flag to change."""


class FrontEndError(ServiceError):
    """The front end does not start. The text says where to look for the reason."""


def grpc_port_in_use(host: str, port: int) -> PortInUseError:
    """Return the error that the port for gRPC cannot be had."""
    return PortInUseError(
        f"cannot listen for gRPC on {host}:{port}: the port is taken or the address is not this machine's; "
        "choose another with --grpc-port or --host, or let --grpc-port 0 take a free one"
    )
