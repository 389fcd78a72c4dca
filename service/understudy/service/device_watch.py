"""Reacts to failing devices: withdraws readiness, probes the devices, and ends the service if they stay broken."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Protocol

import structlog

from understudy.evaluator.device_state import DeviceListener, DeviceState
from understudy.service.readiness import Readiness, ReadinessState

_SECONDS_BETWEEN_TRIALS = 1.0

_log = structlog.get_logger(__name__)


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
        evaluator.on_device_state(self._hear)

    async def stop(self) -> None:
        """Stop the trials."""
        self._evaluator.on_device_state(lambda _state, _error: None)
        if self._trials is not None:
            self._trials.cancel()
            await asyncio.wait([self._trials])

    def _hear(self, state: DeviceState, error: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._become, state, error)

    def _become(self, state: DeviceState, error: str) -> None:
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
