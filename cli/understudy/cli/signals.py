"""What commands do about SIGTERM, SIGINT and SIGHUP."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Block SIGTERM in this thread and all threads that it starts, until `let_ending_signals_through`."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def let_ending_signals_through() -> None:
    """Unblock SIGTERM and SIGINT in the main thread, whether `sigterm_held_back` or what started this process did that.

    A front end that runs this program on another thread waits for them itself.
    """
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])


@contextmanager
def hangup_as_sigterm() -> Iterator[None]:
    """Have SIGHUP, which a closing terminal sends, do what SIGTERM does, unless it is ignored, as by nohup.

    Where it is blocked, the front end waits for it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_blocked = signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if not is_main or is_blocked or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
