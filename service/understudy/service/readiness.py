"""Whether the service can serve calls: the state behind gRPC health and /readyz, and what changes it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import structlog

from understudy.evaluator.types import DeviceListener, DeviceState

DRAIN_NOTICE_SECONDS = 0.5
"""How long new calls are still answered while draining, so that callers that watch the health choose another server."""

_SECONDS_BETWEEN_TRIALS = 1.0

_log = structlog.get_logger(__name__)


class Notifier:
    """Wakes every subscribed coroutine, which then reads the changed state itself.

    To miss no change, call `subscribe` first, then read the state, then wait for the event. All methods but
    `notify_threadsafe` belong to the event loop's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._notified = asyncio.Event()

    def subscribe(self) -> asyncio.Event:
        """Return the event that the next notification sets."""
        return self._notified

    def notify(self) -> None:
        """Wake every subscriber."""
        notified, self._notified = self._notified, asyncio.Event()
        notified.set()

    def notify_threadsafe(self) -> None:
        """Wake every subscriber soon, from any thread; does nothing once the event loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.notify)


class ReadinessState(enum.Enum):
    """The state of the service; the value describes it in a sentence."""

    WAITING = "no checkpoint has been loaded yet"
    READY = "ready"
    FAILING = "the devices fail"
    DRAINING = "the server is draining and takes no new work"


class Readiness:
    """The state of the service. Not thread-safe: it belongs to the event loop's thread.

    It changes from WAITING to READY once, between READY and FAILING any number of times, and to DRAINING once.

    Attributes:
        changed: Notifies of each change.
        watchers: How many callers watch the state, and so choose another server when it is not READY.
        held_back: Returns why no checkpoint serves yet, if something keeps it back; empty if nothing is known.
    """

    def __init__(self) -> None:
        self._state = ReadinessState.WAITING
        self.changed = Notifier()
        self.watchers = 0
        self.held_back: Callable[[], str] = lambda: ""

    @property
    def state(self) -> ReadinessState:
        """The current state."""
        return self._state

    @property
    def reason(self) -> str:
        """The current state in a sentence."""
        held_back = self.held_back() if self._state is ReadinessState.WAITING else ""
        return held_back or self._state.value

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


class TriesDevices(Protocol):
    """The part of the evaluator that `DeviceWatch` uses."""

    def on_device_state(self, listener: DeviceListener) -> None:
        """Call the listener when the devices' state changes, on any thread."""

    def try_devices(self) -> Future[None]:
        """Run a trial computation on the devices."""


class DeviceWatch:
    """Follows the devices' state. Belongs to the running event loop.

    While the devices fail, callers may send no requests that would show a recovery, so this class runs its own trials.

    Args:
        evaluator: The owner of the devices.
        readiness: Set to failing, and back to ready.

    Attributes:
        failed: Done, with the last error, once the devices have failed permanently.
    """

    def __init__(self, evaluator: TriesDevices, readiness: Readiness) -> None:
        self._evaluator = evaluator
        self._readiness = readiness
        self._loop = asyncio.get_running_loop()
        self._trials: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str] = self._loop.create_future()
        evaluator.on_device_state(self._on_device_state)

    async def stop(self) -> None:
        """Stop the trials."""
        self._evaluator.on_device_state(lambda _state, _error: None)
        if self._trials is not None:
            self._trials.cancel()
            await asyncio.wait([self._trials])

    def _on_device_state(self, state: DeviceState, error: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_state, state, error)

    def _set_state(self, state: DeviceState, error: str) -> None:
        if state is DeviceState.WORKING:
            _log.info("the devices work again")
            self._readiness.recover()
            return
        _log.error("the devices fail", error=error, final=state is DeviceState.FAILED)
        self._readiness.start_failing()
        if state is DeviceState.FAILED and not self.failed.done():
            self.failed.set_result(error)
        elif self._trials is None or self._trials.done():
            self._trials = asyncio.create_task(self._try_until_settled())

    async def _try_until_settled(self) -> None:
        """Try the devices until they work, have failed permanently, or the service ends."""
        while self._readiness.state is ReadinessState.FAILING and not self.failed.done():
            try:
                await asyncio.wrap_future(self._evaluator.try_devices())
            except Exception as error:  # noqa: BLE001 - the evaluator classifies it and calls back
                _log.warning("a trial of the devices failed", error=str(error))
            await asyncio.sleep(_SECONDS_BETWEEN_TRIALS)
