"""The service's own exceptions, raised while it starts, and the check of a setting's range.

ServiceError
├── SettingsError                 a setting cannot be used
├── PortInUseError                another process listens on the port
└── FrontEndError                 the front end does not start
"""

from __future__ import annotations

from understudy.service.addresses import host_and_port


class ServiceError(Exception):
    """The base class of errors that keep the service from starting. The text is for the operator."""


class SettingsError(ServiceError, ValueError):
    """A setting cannot be used. The text names it, its value and what was expected."""


class PortInUseError(ServiceError):
    """Another process listens on the port. The text names the address and the flag to change."""


class FrontEndError(ServiceError):
    """The front end does not start. The text says where to find the reason."""


def grpc_port_in_use(host: str, port: int) -> PortInUseError:
    """Return the error for a gRPC port that is not available."""
    return PortInUseError(
        f"cannot listen for gRPC on {host_and_port(host, port)}: the port is taken or the address is not this "
        "machine's; choose another with --grpc-port or --host, or let --grpc-port 0 take a free one"
    )


def check_range(settings: object, name: str, *, low: float, high: float = float("inf")) -> None:
    """Raise SettingsError unless the value of a setting is in a range, whose ends belong to it."""
    value = getattr(settings, name)
    if not low <= value <= high:
        expected = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise SettingsError(f"{name} is {value}; give {expected}")
