"""The Envoy in this process: pyvoy's event loop, signals, the admin interface, and the front end."""

from __future__ import annotations

import asyncio
import ctypes
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from understudy.service.calls.call_limits import DisconnectMonitor
from understudy.service.calls.methods import CoalescingOptions
from understudy.service.calls.served_call import ServedMethods
from understudy.service.envoy.asgi_app import GrpcAsgiApp
from understudy.service.envoy.asgi_call import Receive, Scope, Send
from understudy.service.envoy.launch import ENDING_SIGNALS, ReexecState, exec_envoy, write_secrets
from understudy.service.front_end import SAME_SIGNAL_SECONDS, Main
from understudy.service.service_errors import FrontEndError
from understudy.service.settings import ServeSettings
from understudy.service.tls import ServerCertificates

_LIVE_SECONDS: Final = 30.0
"""The longest wait for Envoy to listen."""
_SEND_SECONDS: Final = 5.0
"""The longest wait for the last responses to leave this process."""
_TIMEOUT_SECONDS: Final = 5.0
_ASK_SECONDS: Final = 0.02
_GOAWAY_SECONDS: Final = 1.0
"""How long connections may bring new calls after GOAWAY."""
_BUSY: Final = ("downstream_rq_active", "downstream_cx_tx_bytes_buffered")
_CONNECTED: Final = ("downstream_cx_active",)
_PREFIX: Final = "http.ingress_http."
"""The prefix of pyvoy's statistics; those of the admin interface have another."""

_T = TypeVar("_T")

Application = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]

_current: Host | None = None


def current() -> Host | None:
    """Return the Envoy in this process, or None outside of Envoy."""
    return _current


def __getattr__(name: str) -> Host:
    """Create the Envoy in this process when pyvoy looks up ``app``, the application that `launch` names."""
    global _current  # noqa: PLW0603 - a process has one Envoy, and pyvoy creates it by looking up a name
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _current = Host(ReexecState.restore())
    return _current


class Host:
    """An ASGI application that starts the program with Envoy, and serves calls once the program calls `open`.

    Args:
        program: The program that this process ran before it became Envoy.
    """

    _asgi_single_callable = True  # makes pyvoy call it directly, without a wrapping coroutine

    def __init__(self, program: ReexecState) -> None:
        self.launched = program
        self._answer: Application = self._wait_and_answer
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Serve a call or the lifespan as an ASGI application."""
        if scope["type"] == "lifespan":
            return self._live(receive, send)
        return self._answer(scope, receive, send)

    def open(self, application: Application) -> None:
        """Serve calls with an application from now on, first those that have been waiting. On the event loop."""
        self._answer = application
        self._opened.set()

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run the service on the event loop, from the program's thread; return its result.

        Envoy's folder is deleted then, as the program may end in any way.
        """
        if self._loop is None:
            raise RuntimeError("the event loop has not been started")
        try:
            return asyncio.run_coroutine_threadsafe(main, self._loop).result()
        finally:
            self.launched.clean_up()

    def handle_signals(self, on_signal: Callable[[signal.Signals], None]) -> None:
        """Do what `HandleSignals` says, for SIGHUP, too, which a closing terminal sends."""
        loop = asyncio.get_running_loop()
        numbers = ENDING_SIGNALS & signal.pthread_sigmask(signal.SIG_BLOCK, ())

        def wait() -> None:
            number = signal.sigwait(numbers)
            loop.call_soon_threadsafe(on_signal, signal.Signals(number))
            same_until = time.monotonic() + SAME_SIGNAL_SECONDS
            number = signal.sigwait(numbers)
            while time.monotonic() < same_until:
                number = signal.sigwait(numbers)
            self.launched.clean_up()
            _exit_by_signal(number)

        threading.Thread(target=wait, name="signals", daemon=True).start()

    async def _wait_and_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._opened.wait()
        await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self.launched.run_and_exit, name="program", daemon=True).start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})


def _exit_by_signal(number: int) -> None:
    """End the process by a signal from a thread other than the main one, where `signal.signal` is not allowed."""
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(number, None)  # SIG_DFL
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


class Admin:
    """Calls Envoy's admin interface.

    Args:
        path: Its socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def wait_live(self, seconds: float) -> None:
        """Wait until Envoy listens; raise FrontEndError if it does not."""

        async def live() -> bool:
            try:
                return (await self._request_admin("GET", "/ready")).startswith(b"LIVE")
            except OSError:
                return False

        if not await _until(live, seconds):
            raise FrontEndError(f"Envoy did not begin to listen within {seconds:g} s; its own log says why")

    async def start_draining(self) -> None:
        """Accept no connection any more, and send GOAWAY on each with its next response."""
        await self._request_admin("POST", "/healthcheck/fail")
        await self._request_admin("POST", "/drain_listeners")

    async def until_unconnected(self, seconds: float) -> None:
        """Wait until every connection is closed, or the time is up."""
        await self._until_zero(_CONNECTED, seconds)

    async def until_sent(self, seconds: float) -> None:
        """Wait until every response has left this process, or the time is up."""
        await self._until_zero(_BUSY, seconds)

    async def _until_zero(self, names: Sequence[str], seconds: float) -> None:
        """Wait until these statistics are zero, or the time is up."""

        async def are_zero() -> bool:
            stats = json.loads(await self._request_admin("GET", f"/stats?format=json&filter={'|'.join(names)}"))[
                "stats"
            ]
            values = {stat["name"]: stat["value"] for stat in stats if "name" in stat}
            return all(not values.get(_PREFIX + name) for name in names)

        await _until(are_zero, seconds)

    async def _request_admin(self, method: Literal["GET", "POST"], path: str) -> bytes:
        return await asyncio.to_thread(self._request_admin_blocking, method, path)

    def _request_admin_blocking(self, method: str, path: str) -> bytes:
        connection = _UnixConnection(self._path)
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_SECONDS)
        self.sock.connect(str(self._path))


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() >= ends:
            return False
        await asyncio.sleep(_ASK_SECONDS)
    return True


def run(settings: ServeSettings, main: Main[_T]) -> _T:
    """Run the service with this front end; see `understudy.service.front_end.RunFrontEnd`.

    Outside of Envoy, this process becomes Envoy, which re-runs the program; control returns here inside it.
    """
    host = current()
    if host is None:
        exec_envoy(settings)
    make = partial(
        EnvoyServer, host=host, max_message_bytes=settings.max_message_bytes, max_body_bytes=settings.max_body_bytes
    )
    return host.run(main(make, host.handle_signals))


class EnvoyServer:
    """A front end, see `understudy.service.front_end.FrontEnd`. Belongs to the event loop on which it is created.

    Args:
        certificates: The certificates for TLS, which `launch` gave to Envoy; None without TLS.
        host: The Envoy in this process.
        max_message_bytes: The largest message to receive or send.
        max_body_bytes: The most bytes that all unfinished bodies together may hold.
    """

    coalescing: Final = CoalescingOptions(loop_turns=24, examples=16)
    """Simultaneous calls arrive together, but their bodies are requested and arrive one by one."""

    def __init__(
        self, certificates: ServerCertificates | None, *, host: Host, max_message_bytes: int, max_body_bytes: int
    ) -> None:
        self._host = host
        if certificates is not None:
            write = partial(write_secrets, Path(host.launched.folder))
            write(certificates.current)  # they may have changed since the launch
            certificates.on_change(write)
        self._admin = Admin(host.launched.admin_socket)
        self._monitor = DisconnectMonitor()
        self._max_message_bytes = max_message_bytes
        self._max_body_bytes = max_body_bytes
        self._app: GrpcAsgiApp | None = None

    def bind(self, host: str, port: int) -> int:
        """Return the port that was bound before this process became Envoy."""
        del host, port
        return self._host.launched.port

    async def start(self, methods: ServedMethods) -> None:
        """Start to serve calls, first those that have been waiting; called again, serve calls of other methods.

        Raises:
            FrontEndError: Envoy does not listen.
        """
        await self._admin.wait_live(_LIVE_SECONDS)
        self._app = GrpcAsgiApp(methods, self._monitor, self._max_message_bytes, max_body_bytes=self._max_body_bytes)
        self._host.open(self._app)

    async def drain(self, seconds: float) -> None:
        """See `FrontEnd`. Calls that arrive before their caller can know of the end are answered."""
        if self._app is None:
            return
        notice = min(_GOAWAY_SECONDS, seconds)
        await self._admin.start_draining()
        await self._admin.until_unconnected(notice)
        self._app.start_draining()
        await self._monitor.until_alone(seconds - notice)
        await self._admin.until_sent(_SEND_SECONDS)
