"""Whether the service can answer, for gRPC health, /readyz and whoever waits for a change."""

from __future__ import annotations

import enum

from understudy.service.notifier import Notifier


class ReadinessState(enum.Enum):
    """What the service is doing; the value is a sentence for people."""

    WAITING = "no checkpoint has been loaded yet"
    READY = "ready"
    FAILING = "the devices fail"
    DRAINING = "the server is draining and takes no new work"


class Readiness:
    """The state of the service. Not thread-safe: it belongs to the event loop's thread.

    It goes from WAITING to READY once, between READY and FAILING to and fro, and from any to DRAINING once.
    """

    def __init__(self) -> None:
        self._state = ReadinessState.WAITING
        self.changed = Notifier()

    @property
    def state(self) -> ReadinessState:
        """What the service is doing now."""
        return self._state

    def become_ready(self) -> None:
        """Say that the first servable is serving; has no effect while draining."""
        if self._state is ReadinessState.WAITING:
            self._change(ReadinessState.READY)

    def start_failing(self) -> None:
        """Say that the devices fail; has no effect unless the service is ready."""
        if self._state is ReadinessState.READY:
            self._change(ReadinessState.FAILING)

    def recover(self) -> None:
        """Say that the devices work again."""
        if self._state is ReadinessState.FAILING:
            self._change(ReadinessState.READY)

    def start_draining(self) -> None:
        """Say that the end is near."""
        self._change(ReadinessState.DRAINING)

    def _change(self, state: ReadinessState) -> None:
        self._state = state
        self.changed.notify()
