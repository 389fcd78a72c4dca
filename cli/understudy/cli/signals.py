"""What commands do about SIGTERM, SIGINT and SIGHUP."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

_WAS_BLOCKED: Final = "understudy.cli.signals.was_blocked"


@contextmanager
def sigterm_held_back(context: click.Context) -> Iterator[None]:
    """Block SIGTERM in this thread and all threads that it starts, until `let_sigterm_through`."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    context.meta[_WAS_BLOCKED] = signal.SIGTERM in previous
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def let_sigterm_through() -> None:
    """Undo what `sigterm_held_back` did for commands that may join a cluster: this process joins none."""
    if not click.get_current_context().meta.get(_WAS_BLOCKED):  # as by a front end that waits for it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def let_ending_signals_through() -> None:
    """Unblock SIGTERM and SIGINT, which a process inherits blocked if a thread that blocks them started it.

    The front end that runs this program on another thread waits for them.
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
