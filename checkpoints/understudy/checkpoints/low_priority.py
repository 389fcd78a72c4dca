"""Long work that yields the CPU to other threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

NICENESS: Final = 10
"""The increase in niceness: such a thread gets about a tenth of a core if all are busy, and a whole one if not."""

_T = TypeVar("_T")


def at_low_priority(work: Callable[[], _T]) -> _T:
    """Run work on a thread of low priority, and wait for it.

    If the system preempts the thread while it holds the GIL, all threads wait for it. Use this only for work that
    releases the GIL for milliseconds and holds it for microseconds in between. Systems without thread priorities run
    the work at normal priority.

    Raises:
        Exception: Whatever the work raises.
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
    """Lower the priority of this thread alone; on Linux a thread has an id like a process."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
