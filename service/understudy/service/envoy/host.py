"""The Envoy in this process: pyvoy's event loop, the program that re-runs beside it, and signals."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from understudy.service.envoy.asgi_call import Receive, Scope, Send
from understudy.service.envoy.launch import ENDING_SIGNALS, ReexecState

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
        """Run a coroutine on the event loop, from the program's thread; return its result."""
        if self._loop is None:
            raise RuntimeError("the event loop has not been started")
        return asyncio.run_coroutine_threadsafe(main, self._loop).result()

    def hear_signals(self, on_signal: Callable[[signal.Signals], None]) -> None:
        """Call back on the event loop on the first SIGTERM or SIGINT; the second ends the process at once."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            first = signal.sigwait(ENDING_SIGNALS)
            loop.call_soon_threadsafe(on_signal, signal.Signals(first))
            second = signal.sigwait(ENDING_SIGNALS)
            self.launched.clean_up()
            _exit_by_signal(second)

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
