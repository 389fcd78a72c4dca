"""Addresses of this service and of its callers, as text."""

from __future__ import annotations

from ipaddress import ip_address


def host_and_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 address."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def bare_host(host: str) -> str:
    """Return a host without the brackets around an IPv6 address."""
    return host.strip("[]")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address: 127.0.0.0/8, ::1 and localhost."""
    try:
        return ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host == "localhost"
