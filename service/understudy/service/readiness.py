"""Whether the service can answer, for gRPC health, /readyz and whoever waits for a change."""

from __future__ import annotations

import enum

from understudy.service.bell import Bell


class ReadinessState(enum.Enum):
    """What the service is doing; the value is a sentence for people."""

    WAITING = "no checkpoint has been loaded yet"
    READY = "ready"
    DRAINING = "the server is draining and takes no new work"


class Readiness:
    """The state of the service. Not thread-safe: it belongs to the event loop's thread.

    It goes from WAITING to READY once and from either to DRAINING once, and never back.
    """

    def __init__(self) -> None:
        self._state = ReadinessState.WAITING
        self.changed = Bell()

    @property
    def state(self) -> ReadinessState:
        """What the service is doing now."""
        return self._state

    def become_ready(self) -> None:
        """Say that the first servable is on stage; has no effect while draining."""
        if self._state is ReadinessState.WAITING:
            self._change(ReadinessState.READY)

    def start_draining(self) -> None:
        """Say that the end is near."""
        self._change(ReadinessState.DRAINING)

    def _change(self, state: ReadinessState) -> None:
        self._state = state
        self.changed.ring()
