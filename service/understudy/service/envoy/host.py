"""The Envoy that this process is: pyvoy's event loop, the program that runs again beside it, and signals."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from understudy.service.envoy.asgi import Receive, Scope, Send
from understudy.service.envoy.reexec_state import ReexecState

_T = TypeVar("_T")

Application = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]

ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
"""These are blocked in every thread, or else Envoy would end at once on the first one."""

_current: Host | None = None


def current() -> Host | None:
    """Return the Envoy that this process is, or None if it is none."""
    return _current


def begin(program: ReexecState) -> Host:
    """Return the Envoy that this process is, which is to run a program. Call it once, inside Envoy."""
    global _current  # noqa: PLW0603 - there is one Envoy in a process, and pyvoy makes it by importing a module
    _current = Host(program)
    return _current


class Host:
    """An ASGI application that starts the program with Envoy, and answers calls once the program has opened it.

    Args:
        program: What this process ran before it became Envoy.
    """

    _asgi_single_callable = True  # lets pyvoy call it as it is, without a coroutine of its own

    def __init__(self, program: ReexecState) -> None:
        self.launched = program
        self._answer: Application = self._wait_and_answer
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Answer a call, or Envoy's own start. An ASGI application."""
        if scope["type"] == "lifespan":
            return self._live(receive, send)
        return self._answer(scope, receive, send)

    def open(self, application: Application) -> None:
        """Answer calls with an application from now on, first those that have been waiting. On the event loop."""
        self._answer = application
        self._opened.set()

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the event loop, from the program's thread; return what it returns."""
        if self._loop is None:
            raise RuntimeError("the event loop has not been started")
        return asyncio.run_coroutine_threadsafe(main, self._loop).result()

    def hear_signals(self, on_signal: Callable[[signal.Signals], None]) -> None:
        """Call back on the event loop at the first SIGTERM or SIGINT; the second ends the process at once."""
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
    """End the process by a signal, in a thread that is not Python's main one, where `signal.signal` is not allowed."""
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(number, None)  # SIG_DFL
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
