"""The thread that works on the devices, and the batches that are brief enough to run on the event loop's instead."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)

Job = Callable[[], Callable[[], None] | None]
"""Does its work, or launches it and returns a function that completes it once the device is done."""

BRIEF_SECONDS = 1e-3
"""A handover to another thread and back takes some tenths of this, and more on a busy machine."""

LONGEST_SECONDS = 2e-3
"""The maximum time that an inline batch may block the event loop."""

_TRIAL_BATCHES = 8
_REMEMBERED_BATCHES = 32
_FORGIVEN_BATCHES = 1
_FIRST_BAN_BATCHES = 64
_LONGEST_BAN_BATCHES = 2**20
_REMEMBERED_SHAPES = 256


class DeviceThread:
    """A thread that runs one job after another; while it is idle, another thread may run one. Thread-safe.

    Args:
        wait: Called on the thread, with whether to wait for work; returns how many seconds it waited to fill the batch,
            or None after shutdown, or None if the launched job must be completed first.
        next_job: Called with these seconds when the device is free; returns the job.
        name: The name of the thread.
    """

    def __init__(
        self,
        *,
        wait: Callable[[bool], float | None],
        next_job: Callable[[float], Job],
        name: str = "understudy-device",
    ) -> None:
        self._wait = wait
        self._next_job = next_job
        self._device = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether a job is being taken or run."""
        return self._device.locked()

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
        while (fill_seconds := self._wait(launched is None)) is not None or launched is not None:
            with self._device:
                following = None if fill_seconds is None else _begin(self._next_job(fill_seconds))
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


class InlineJudge:
    """Decides by the duration of recent batches of the same shape. Thread-safe.

    A shape is a group of requests (version, dtypes and all dimensions except the first) and the number of examples,
    rounded up to a power of two. Its first batches run on the device's thread, which has to wait for the GIL; therefore
    their lower quartile must be brief. Then the event loop's own batches count, by a high quantile: if a second one of
    the last 32 takes more than `LONGEST_SECONDS`, or half of them are not brief, the shape returns to the device's
    thread, each time for twice as many batches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shapes: OrderedDict[tuple[Hashable, int], _Shape] = OrderedDict()

    def is_brief(self, group: Hashable, examples: int) -> bool:
        """Return whether a batch is brief enough to run inline; False while unknown."""
        with self._lock:
            shape = self._shapes.get(_key(group, examples))
            return shape is not None and shape.is_brief()

    def observe(self, group: Hashable, examples: int, cost: Cost, *, inline: bool) -> None:
        """Add the cost of a batch, including all work of its thread."""
        key = _key(group, examples)
        with self._lock:
            shape = self._shapes.setdefault(key, _Shape())
            self._shapes.move_to_end(key)
            if inline:
                shape.ran_inline(cost)
            else:
                shape.ran_on_device_thread(cost)
            if len(self._shapes) > _REMEMBERED_SHAPES:
                self._shapes.popitem(last=False)


@dataclass(frozen=True)
class Cost:
    """The cost of a batch.

    Attributes:
        wall_seconds: The elapsed time.
        cpu_seconds: The CPU time of the whole process meanwhile. It is less if other processes used the cores.
    """

    wall_seconds: float
    cpu_seconds: float


class Stopwatch:
    """Measures the cost of a batch, from the creation of this object."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._cpu = time.process_time()

    def cost(self) -> Cost:
        """Return the cost so far."""
        return Cost(time.monotonic() - self._wall, time.process_time() - self._cpu)


@dataclass(kw_only=True)
class _Shape:
    """The recent batches of one shape."""

    trial: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _TRIAL_BATCHES))
    inline: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_BATCHES))
    banned_batches: int = 0
    next_ban: int = _FIRST_BAN_BATCHES

    def is_brief(self) -> bool:
        if self.inline:
            return True
        if self.banned_batches or len(self.trial) < _TRIAL_BATCHES:
            return False
        return sorted(self.trial)[len(self.trial) // 4] < BRIEF_SECONDS

    def ran_on_device_thread(self, cost: Cost) -> None:
        self.trial.append(cost.wall_seconds)
        self.banned_batches = max(0, self.banned_batches - 1)

    def ran_inline(self, cost: Cost) -> None:
        seconds = min(cost.wall_seconds, cost.cpu_seconds)
        self.inline.append(seconds)
        if seconds > BRIEF_SECONDS and self._is_too_long():
            self.banned_batches, self.next_ban = self.next_ban, min(2 * self.next_ban, _LONGEST_BAN_BATCHES)
            self.inline.clear()
            self.trial.clear()

    def _is_too_long(self) -> bool:
        """Whether half of the batches are not brief, or too many take more than `LONGEST_SECONDS`."""
        not_brief = sum(seconds > BRIEF_SECONDS for seconds in self.inline)
        too_long = sum(seconds > LONGEST_SECONDS for seconds in self.inline)
        return too_long > _FORGIVEN_BATCHES or 2 * not_brief > max(len(self.inline), _TRIAL_BATCHES)


def _key(group: Hashable, examples: int) -> tuple[Hashable, int]:
    return group, (examples - 1).bit_length()
