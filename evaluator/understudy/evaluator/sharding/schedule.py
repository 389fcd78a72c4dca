"""Which worker computes which shard when: the logic without processes, threads and clocks.

Every shard is computed until its first result arrives. The shard of a worker that died is given to another one. A shard
that takes much longer than the others did is given to a second worker, too; the worker that was overtaken is killed
when it does not answer. A shard on which several workers died or hung fails the work.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from understudy.evaluator.evaluator_errors import EvaluatorError
from understudy.evaluator.sharding.pool import WorkerId

MAX_ATTEMPTS = 4
"""How many workers may die or hang on one shard."""

MAX_FAILED_STARTS = 3
"""How many workers in a row may end before they are ready."""

_RECENT = 64


class ShardingError(EvaluatorError):
    """The workers cannot compute a shard, or none can be started. The text gives the last reason."""


@dataclass(frozen=True, kw_only=True)
class WorkerTimeouts:
    """How long a worker may take, in seconds.

    Attributes:
        least: A shard is never overtaken before.
        first: It is overtaken after this time as long as no shard was computed.
        times: It is overtaken after the median time of the recent shards, times this.
        start: A worker may take so long until it is ready.
    """

    least: float = 2.0
    first: float = 60.0
    times: float = 4.0
    start: float = 300.0


@dataclass(frozen=True)
class Submit:
    """Give this shard to this worker."""

    worker: WorkerId
    shard: int


@dataclass(frozen=True)
class Kill:
    """Kill this worker, for this reason. `ShardSchedule` counts it as gone already."""

    worker: WorkerId
    reason: str


@dataclass(kw_only=True)
class _Worker:
    since: float
    is_ready: bool = False
    shard: int | None = None


@dataclass(kw_only=True)
class _Attempts:
    failed: int = 0
    running: dict[WorkerId, float] = field(default_factory=dict)


class ShardSchedule:
    """Gives shards to workers in order, at most a window of them ahead of what was consumed. For one thread.

    Times are in seconds on any one clock.

    Args:
        shards: The number of shards.
        window: How many shards may be begun and not consumed. Bounds the memory of their results.
        timeouts: How long workers may take.

    Attributes:
        window: See above; it may be changed.
        repeated: How many shards were given to a further worker.
    """

    def __init__(self, shards: int, *, window: int, timeouts: WorkerTimeouts | None = None) -> None:
        self._shards = shards
        self.window = window
        self._timeouts = timeouts or WorkerTimeouts()
        self._workers: dict[WorkerId, _Worker] = {}
        self._next = 0
        self._again: set[int] = set()
        self._under_way: dict[int, _Attempts] = {}
        self._computed: set[int] = set()
        self._consumed = 0
        self._failed_starts = 0
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._strained = 1.0
        self.repeated = 0

    @property
    def workers(self) -> int:
        """The number of workers that are starting or ready."""
        return len(self._workers)

    @property
    def is_finished(self) -> bool:
        """Whether every shard was computed."""
        return self._next == self._shards and not self._again and not self._under_way

    @property
    def begun(self) -> int:
        """The number of shards that were begun and not consumed."""
        return self._next - self._consumed

    def started(self, worker: WorkerId, now: float) -> None:
        """Note a worker that is being started."""
        self._workers[worker] = _Worker(since=now)

    def ready(self, worker: WorkerId, now: float) -> None:
        """Note that a worker takes shards."""
        if worker in self._workers:
            self._workers[worker] = _Worker(since=now, is_ready=True)
            self._failed_starts = 0

    def gone(self, worker: WorkerId, reason: str) -> None:
        """Note that a worker has ended. One that is unknown is ignored.

        Raises:
            ShardingError: Too many workers ended on its shard, or while they were started.
        """
        ended = self._workers.pop(worker, None)
        if ended is None:
            return
        if not ended.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise ShardingError(f"{self._failed_starts} workers in a row ended before they were ready: {reason}")
        if ended.shard is not None and ended.shard in self._under_way:
            self._fail(ended.shard, worker, reason)

    def computed(self, worker: WorkerId, shard: int, now: float) -> bool:
        """Note a result; return whether it is the shard's first, which counts."""
        known = self._workers.get(worker)
        if known is not None and known.shard == shard:
            known.shard = None
        attempts = self._under_way.pop(shard, None)
        if attempts is None:
            return False
        if worker in attempts.running:
            self._durations.append(now - attempts.running[worker])
        self._again.discard(shard)
        self._computed.add(shard)
        return True

    def consumed(self, shards: int) -> None:
        """Note how many shards, from the first one on, were consumed."""
        self._computed.difference_update(range(self._consumed, shards))
        self._consumed = shards

    def decide(self, now: float) -> Sequence[Submit | Kill]:
        """Return what to do now.

        Raises:
            ShardingError: Too many workers hang on a shard, or while they are started.
        """
        return [*self._kills(now), *self._submissions(now)]

    def next_change(self, now: float) -> float:
        """Return after how many seconds `decide` may return something if nothing happens until then."""
        limits = [worker.since + self._timeouts.start - now for worker in self._workers.values() if not worker.is_ready]
        for attempts in self._under_way.values():
            for began in attempts.running.values():
                limits += [began + factor * self._overdue - now for factor in (1.0, 2.0)]
        return min((limit for limit in limits if limit > 0), default=self._timeouts.start)

    @property
    def _overdue(self) -> float:
        """After how many seconds a shard is given to a second worker."""
        usual = self._timeouts.first
        if self._durations:
            usual = max(self._timeouts.least, self._timeouts.times * statistics.median(self._durations))
        return usual * self._strained

    def _kills(self, now: float) -> list[Kill]:
        kills = []
        for name, worker in list(self._workers.items()):
            taken = now - worker.since
            if not worker.is_ready and taken >= self._timeouts.start:
                kills.append(Kill(name, f"it was not ready after {taken:.0f} s"))
            elif worker.shard is not None and taken >= 2 * self._overdue:
                kills.append(Kill(name, f"shard {worker.shard} took {taken:.1f} s"))
        for kill in kills:
            is_needed = self._workers[kill.worker].shard in self._under_way
            self.gone(kill.worker, kill.reason)
            if is_needed:  # the machines may just be slower now: wait longer before the next one is killed
                self._strained *= 2
        return kills

    def _submissions(self, now: float) -> list[Submit]:
        submissions = []
        for name, worker in self._workers.items():
            if not worker.is_ready or worker.shard is not None:
                continue
            shard = self._choose(now)
            if shard is None:
                break
            worker.shard, worker.since = shard, now
            self._under_way.setdefault(shard, _Attempts()).running[name] = now
            submissions.append(Submit(name, shard))
        return submissions

    def _choose(self, now: float) -> int | None:
        """Return the shard that is to be computed next: one to repeat, one to overtake, or the next."""
        overdue = [
            shard
            for shard, attempts in self._under_way.items()
            if len(attempts.running) == 1 and now - next(iter(attempts.running.values())) >= self._overdue
        ]
        urgent = min([*self._again, *overdue], default=None)
        if urgent is not None:
            self._again.discard(urgent)
            self.repeated += 1
            return urgent
        if self._next == self._shards or self._next >= self._consumed + self.window:
            return None
        self._next += 1
        return self._next - 1

    def _fail(self, shard: int, worker: WorkerId, reason: str) -> None:
        attempts = self._under_way[shard]
        attempts.running.pop(worker, None)
        attempts.failed += 1
        if attempts.failed >= MAX_ATTEMPTS:
            raise ShardingError(f"{attempts.failed} workers ended on shard {shard}: {reason}")
        if not attempts.running:
            self._again.add(shard)
