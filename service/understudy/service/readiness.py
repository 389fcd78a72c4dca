"""Whether the service can serve calls: the state behind gRPC health and /readyz."""

from __future__ import annotations

import enum

from understudy.service.notifier import Notifier


class ReadinessState(enum.Enum):
    """The state of the service; the value describes it in a sentence."""

    WAITING = "no checkpoint has been loaded yet"
    READY = "ready"
    FAILING = "the devices fail"
    DRAINING = "the server is draining and takes no new work"


class Readiness:
    """The state of the service. Not thread-safe: it belongs to the event loop's thread.

    It changes from WAITING to READY once, between READY and FAILING any number of times, and to DRAINING once.
    """

    def __init__(self) -> None:
        self._state = ReadinessState.WAITING
        self.changed = Notifier()

    @property
    def state(self) -> ReadinessState:
        """The current state."""
        return self._state

    def become_ready(self) -> None:
        """Change to READY, as the first servable is serving; has no effect while draining."""
        if self._state is ReadinessState.WAITING:
            self._change(ReadinessState.READY)

    def start_failing(self) -> None:
        """Change to FAILING, as the devices fail; has no effect unless the service is ready."""
        if self._state is ReadinessState.READY:
            self._change(ReadinessState.FAILING)

    def recover(self) -> None:
        """Change back to READY, as the devices work again."""
        if self._state is ReadinessState.FAILING:
            self._change(ReadinessState.READY)

    def start_draining(self) -> None:
        """Change to DRAINING."""
        self._change(ReadinessState.DRAINING)

    def _change(self, state: ReadinessState) -> None:
        self._state = state
        self.changed.notify()
