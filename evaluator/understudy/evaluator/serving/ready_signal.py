"""The moment the first servable is serving."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ReadySignal:
    """Signals once that a servable is serving. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step: int | None = None
        self._callbacks: list[Callable[[int], None]] = []

    def give(self, step: int) -> None:
        """Give the signal with the serving step. Later calls have no effect."""
        with self._changed:
            if self._step is not None:
                return
            self._step = step
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(step)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the signal; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._step is not None, timeout_seconds)

    def call(self, callback: Callable[[int], None]) -> None:
        """Call back with the step when the signal is given, or at once if it already was."""
        with self._changed:
            step = self._step
            if step is None:
                self._callbacks.append(callback)
        if step is not None:
            callback(step)
