"""Long work that gives way to whatever else wants a core."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

NICENESS: Final = 10
"""By how much less the system favours such a thread: a tenth of a core where all are wanted, a whole one where not."""

_T = TypeVar("_T")


def at_low_priority(work: Callable[[], _T]) -> _T:
    """Do work on a thread of low priority, and wait for it.

    The thread must not be kept from running while it holds Python's lock, or everybody would wait for a core to become
    free: so this is for work that goes on for milliseconds without the lock and takes it for microseconds between.
    Systems that know no priority of threads do it like any other work.

    Raises:
        Exception: What the work raises.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        _lower_priority()
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="understudy-patient")
    thread.start()
    thread.join()
    return outcome.result()


def _lower_priority() -> None:
    """Lower that of this thread alone, which on Linux has a number like a process."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
