"""Limits of calls whose transport sets none: deadlines and disconnected callers.

Envoy reports disconnects only when polled, and a poll takes a round trip between threads. So the monitor does not poll
at the start of a call, when most calls end, and polls less often the longer a call lasts.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from abc import abstractmethod
from typing import Any, Final, Protocol

from understudy.service.calls.served_call import Call
from understudy.service.calls.status import (
    COMPUTATION_CANCELLED,
    DEADLINE_PASSED,
    SERVER_ENDED,
    CallEndedError,
    Failure,
)

FIRST_CHECK_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 0.25
_PAUSE_TO_AGE: Final = 0.25
"""How long to wait before the next poll, as a fraction of the call's age."""


class Watched(Protocol):
    """What the monitor needs of a running call."""

    started: float
    """When it began, in seconds on the clock of `time.monotonic`."""
    deadline: float | None
    """When its caller stops waiting, on the same clock; None if never."""

    def poll(self) -> None:
        """Check whether the caller is still connected; end the call if not."""

    def end(self, failure: Failure) -> None:
        """End the call with a status."""


class DisconnectMonitor:
    """Watches the running calls. Belongs to the event loop's thread.

    It lets go of a call as soon as it is over: freeing thousands of them later costs more, as they have left the cache.

    Attributes:
        loop: The event loop on which it was created.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._young: dict[Watched, None] = {}
        self._old: set[Watched] = set()
        self._due: list[tuple[float, int, Watched]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._alone = asyncio.Event()
        self._alone.set()

    def enter(self, call: Watched) -> None:
        """Start to watch a call."""
        self._young[call] = None
        if self._timer is None:
            self._timer = self.loop.call_later(FIRST_CHECK_SECONDS, self._check_due)

    def leave(self, call: Watched) -> None:
        """Stop watching a call, which is over."""
        if call in self._young:
            del self._young[call]
        else:
            self._old.discard(call)
        if not self._young and not self._old:
            self._alone.set()

    async def until_alone(self, seconds: float) -> None:
        """Wait until no call is running; end the remaining ones with UNAVAILABLE when the time is up."""
        if await self._left_alone(seconds):
            return
        for call in (*self._young, *self._old):
            call.end(SERVER_ENDED)
        await self._left_alone(FIRST_CHECK_SECONDS)

    async def _left_alone(self, seconds: float) -> bool:
        if self._young or self._old:
            self._alone.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._alone.wait()
        except TimeoutError:
            return False
        return True

    def _check_due(self) -> None:
        now = time.monotonic()
        for call in self._grown_up(now):
            del self._young[call]
            self._old.add(call)
            self._check_call(call, now)
        while self._due and self._due[0][0] <= now:
            self._check_call(heapq.heappop(self._due)[2], now)
        self._timer = self.loop.call_later(FIRST_CHECK_SECONDS, self._check_due) if self._young or self._due else None

    def _grown_up(self, now: float) -> list[Watched]:
        """Return the calls that have just been running for long enough to be checked; they are entered in order."""
        return list(itertools.takewhile(lambda call: call.started + FIRST_CHECK_SECONDS <= now, self._young))

    def _check_call(self, call: Watched, now: float) -> None:
        if call not in self._old:
            return
        if call.deadline is not None and call.deadline <= now:
            call.end(DEADLINE_PASSED)
            return
        call.poll()
        pause = min(max((now - call.started) * _PAUSE_TO_AGE, FIRST_CHECK_SECONDS), LONGEST_PAUSE_SECONDS)
        due = now + pause if call.deadline is None else min(now + pause, call.deadline)
        heapq.heappush(self._due, (due, next(self._numbers), call))


class WatchedCall(Call):
    """A call whose transport enforces no deadline: it is ended by cancelling its task.

    Args:
        monitor: Watches the call, which enters it when it is opened.

    Attributes:
        monitor: Watches the call.
        task: The task that is cancelled to end the call; None while it may not be.
    """

    __slots__ = ("_ending", "monitor", "task")

    def __init__(self, monitor: DisconnectMonitor) -> None:
        super().__init__()
        self.monitor = monitor
        self.task: asyncio.Task[Any] | None = None
        self._ending: Failure | None = None

    @abstractmethod
    def poll(self) -> None:
        """Check whether the caller is still connected; end the call if not."""

    def close(self) -> None:
        """See `Call`."""
        self.task = None
        self.monitor.leave(self)

    def end(self, failure: Failure) -> None:
        """End the call with a status, by cancelling its task as soon as that is allowed."""
        if self._ending is None:
            self._ending = failure
            if self.task is not None:
                self.task.cancel()

    def allow_cancelling(self) -> None:
        """Allow the running task to be cancelled from now on to end the call.

        Raises:
            CallEndedError: The call has already been ended.
        """
        if self._ending is not None:
            raise CallEndedError(self._ending)
        self.task = asyncio.current_task(self.monitor.loop)

    def why_cancelled(self) -> Failure:
        """See `Call`."""
        task = asyncio.current_task()
        if self._ending is not None:
            if task is not None:
                task.uncancel()
            return self._ending
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return COMPUTATION_CANCELLED
