"""The thread that calls the devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_Turn = TypeVar("_Turn")
Job = Callable[[], Callable[[], None] | None]
"""Does its work, or launches it and returns a function that completes it once the device is done."""

_log = logging.getLogger(__name__)


class DeviceThread(Generic[_Turn]):
    """A thread that runs one job after another; while it is idle, another thread may run one. Thread-safe.

    Args:
        wait: Called on the thread, with whether to wait for work; returns a turn, or None after shutdown, or None if
            the launched job must be completed first.
        next_job: Called when the device is free; returns the job of a turn.
    """

    def __init__(self, *, wait: Callable[[bool], _Turn | None], next_job: Callable[[_Turn], Job]) -> None:
        self._wait = wait
        self._next_job = next_job
        self._device = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="understudy-device", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def do_here(self, next_job: Callable[[], Job | None]) -> None:
        """Run the next job, if any, on the calling thread if the device is free."""
        if not self._device.acquire(blocking=False):
            return
        try:
            job = next_job()
            if job is not None:
                do(job)
        finally:
            self._device.release()

    def join(self, timeout_seconds: float) -> None:
        """Wait until the thread has ended, or until the timeout."""
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        launched: Callable[[], None] | None = None
        while (turn := self._wait(launched is None)) is not None or launched is not None:
            with self._device:
                following = None if turn is None else _begin(self._next_job(turn))
                if launched is not None:
                    _begin(launched)
                launched = following


def do(job: Job) -> None:
    """Run a job, and wait for the device if it was launched. Errors are logged."""
    launched = _begin(job)
    if launched is not None:
        _begin(launched)


def _begin(job: Job) -> Callable[[], None] | None:
    try:
        return job()
    except Exception:  # noqa: BLE001 - the thread serves all requests and must survive a faulty observer
        _log.exception("an observer or a callback failed on the device's thread")
        return None
