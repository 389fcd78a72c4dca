"""SIGTERM, which says that this machine will be taken away soon: training stops where every task can, and saves."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from understudy.trainer.errors import PreemptedError


class PreemptionWatch:
    """Notices SIGTERM while its ``with`` block runs.

    Until `save_from_now_on` is called there is nothing to save, and the signal raises `PreemptedError` at once; then it
    only makes `requested` true. Outside the main thread, where Python cannot handle signals, it notices nothing.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._installed = False
        self._saves = False
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether the signal has come."""
        return self._requested

    def save_from_now_on(self) -> None:
        """Leave it to the caller to look at `requested` and to save; called once the cluster has come together."""
        self._saves = True
        if self._installed:
            # Joining a cluster, TensorFlow puts a handler of its own in the place of ours.
            signal.signal(signal.SIGTERM, self._receive)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)
            self._installed = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._requested = True
        if not self._saves:
            raise PreemptedError("asked to end by SIGTERM before the first step; nothing was there to be saved")
