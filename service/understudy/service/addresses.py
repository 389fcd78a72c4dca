"""Addresses of this service and of its callers, as text."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def host_and_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 address."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def bare_host(host: str) -> str:
    """Return a host without the brackets around an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address: 127.0.0.0/8, ::1 and localhost."""
    try:
        return ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host == "localhost"


def is_http_url(text: str) -> bool:
    """Return whether this is a URL with http or https, a host, and a port that can be, if any."""
    try:
        parts = urlsplit(text)
        has_host = parts.port != 0 and bool(parts.hostname)
    except ValueError:
        return False
    return has_host and parts.scheme in {"http", "https"} and text.isascii() and text.isprintable() and " " not in text
