"""SIGTERM, the notice that this machine will be reclaimed: training stops at a common step, and saves."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from understudy.trainer.trainer_errors import PreemptedError

_SIGNALS = (signal.SIGTERM,)


class PreemptionWatch:
    """Detects SIGTERM while its ``with`` block runs.

    Before `save_from_now_on` there is nothing to save, and the signal raises `PreemptedError` at once; afterwards it
    only sets `requested`. Outside the main thread, where Python cannot handle signals, it detects nothing.

    TensorFlow replaces our handler when it joins a cluster, and a signal in between would be lost. So a task of a
    cluster blocks the signal until `save_from_now_on`, in this thread and in threads that it starts; `requested` is
    true while the signal is pending. Older threads must block it too, as those of ``understudy train`` do.

    Args:
        joins_cluster: Whether this task joins a cluster before it trains.
    """

    def __init__(self, *, joins_cluster: bool) -> None:
        self._joins_cluster = joins_cluster
        self._previous: Any = None
        self._installed = False
        self._saves = False
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether the signal has arrived."""
        return self._requested or (self._installed and signal.SIGTERM in signal.sigpending())

    def check(self) -> None:
        """Raise PreemptedError if the signal has arrived, for this task alone."""
        if self.requested:
            raise PreemptedError("asked to end by SIGTERM before the cluster formed", alone=True)

    def save_from_now_on(self) -> None:
        """Leave it to the caller to check `requested` and to save; called once the cluster has formed."""
        self._saves = True
        if self._installed:
            signal.signal(signal.SIGTERM, self._receive)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)
            self._installed = True
            signal.pthread_sigmask(signal.SIG_BLOCK if self._joins_cluster else signal.SIG_UNBLOCK, _SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handler. A signal that is still pending has had its effect."""
        self.save_from_now_on()
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._requested = True
        if not self._saves:
            raise PreemptedError("asked to end by SIGTERM before the first step; there was nothing to save")
