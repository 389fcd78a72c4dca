"""Ports for servers that must keep theirs over a restart, a proxy that does not answer, and IPv6."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
from pathlib import Path

import pytest

_DEAD_PROXY = "http://127.0.0.1:9"
BEHIND_A_PROXY = {"http_proxy": _DEAD_PROXY, "https_proxy": _DEAD_PROXY, "no_proxy": ""}
"""The environment of a user whose programs reach other networks through a proxy; this one is down."""


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


HAS_IPV6 = _has_ipv6()
"""Whether this machine can call itself by ``::1``; many containers cannot."""
IPV6_LOOPBACK = pytest.param("::1", marks=pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6"))

_FIRST = 20_000
_RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return different ports on 127.0.0.1 that nothing has.

    The system gives none of them to a connection, which could have it while the server is gone: one that looks for
    that server may even connect to itself.
    """
    with contextlib.ExitStack() as stack:
        return [_bound(stack.enter_context(socket.socket())) for _ in range(count)]


def _bound(free: socket.socket) -> int:
    """Bind to a port, drawn anew in each process, as tests draw from one seed."""
    drawn = random.SystemRandom()
    for _ in range(1_000):
        with contextlib.suppress(OSError):
            free.bind(("127.0.0.1", drawn.randrange(_FIRST, _end())))
            return int(free.getsockname()[1])
    raise AssertionError("no port is free")


@functools.cache
def _end() -> int:
    """Return the first port that the system gives to connections."""
    return int(_RANGE_OF_CONNECTIONS.read_text().split()[0])
