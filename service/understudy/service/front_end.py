"""The seam between the service and its gRPC front ends, which are found through entry points, and their addresses.

A package adds a front end by an entry point of the group ``understudy.front_ends``. Its name is the value for
``--frontend``, and it refers to a `RunFrontEnd`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from understudy.service.addresses import bare_host
from understudy.service.calls.methods import CoalescingOptions
from understudy.service.calls.served_call import ServedMethods
from understudy.service.service_errors import SettingsError, grpc_port_in_use
from understudy.service.settings import ServeSettings
from understudy.service.tls import ServerCertificates

ENTRY_POINTS: Final = "understudy.front_ends"
"""The group of the entry points."""

HANDSHAKE_SECONDS: Final = 10.0
"""The longest wait for the beginning of HTTP/2 on a new connection."""
KEEPALIVE_SECONDS: Final = 120.0
KEEPALIVE_TIMEOUT_SECONDS: Final = 20.0
"""A connection that is silent for the first is pinged, and closed if no answer comes within the second."""
MAX_STREAMS: Final = 100
"""The most calls under way on one connection; a client sends further ones when others have ended. Python hears of each
call that is begun, also of one that is cancelled at once."""

_T = TypeVar("_T")


class FrontEnd(Protocol):
    """Answers calls on one port. Belongs to the event loop on which it is created."""

    @property
    def coalescing(self) -> CoalescingOptions:
        """How long simultaneous calls wait for each other."""

    def bind(self, host: str, port: int) -> int:
        """Bind a port, or any free port for 0, and return it.

        Raises:
            PortInUseError: The port is not available.
        """

    async def start(self, methods: ServedMethods) -> None:
        """Start to serve calls of these methods; called again, serve calls of other methods from now on.

        Raises:
            FrontEndError: The front end does not start.
        """

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, let running ones finish, and cancel the rest when the time is up.

        Endless streams end when the service's readiness changes to draining.
        """


MakeFrontEnd = Callable[[ServerCertificates | None], FrontEnd]
"""Creates a front end on the running event loop, for TLS with these certificates, or without TLS."""

HandleSignals = Callable[[Callable[[signal.Signals], None]], None]
"""Has a function called on the running event loop on the first SIGTERM or SIGINT; a later one ends the process.

One within `SAME_SIGNAL_SECONDS` is the first again: a scheduler sends it to the process and to its supervisor, which
forwards it.
"""

SAME_SIGNAL_SECONDS: Final = 1.0

Main = Callable[[MakeFrontEnd, HandleSignals], Coroutine[Any, Any, _T]]
"""The service, from its start to its end."""


class RunFrontEnd(Protocol):
    """Runs the service on an event loop of the front end's choice; called on the main thread."""

    def __call__(self, settings: ServeSettings, main: Main[_T]) -> _T:
        """Run ``main`` to its end, and return its result.

        Raises:
            ServiceError: The front end does not start.
        """


def load_front_end(name: str) -> RunFrontEnd:
    """Return the front end of this name.

    Raises:
        SettingsError: None of this name is installed.
    """
    installed = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none: install understudy again"
        raise SettingsError(f"frontend is {name!r}; installed are {known}")
    run: RunFrontEnd = installed[name].load()
    return run


def handle_signals(on_signal: Callable[[signal.Signals], None]) -> None:
    """Do what `HandleSignals` says, for the main thread's loop."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    has_come = False

    def on_any(number: signal.Signals) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            loop.call_later(SAME_SIGNAL_SECONDS, end_on_next)
            on_signal(number)

    def end_on_next() -> None:
        for handled in numbers:
            loop.remove_signal_handler(handled)
            signal.signal(handled, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, on_any, number)


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that reserves a port, or any free port for 0, for this process without listening on it.

    Raises:
        PortInUseError: The port is not available.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
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
