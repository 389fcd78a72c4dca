"""Has a pool of workers compute shards, and hands out their results in order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from understudy.evaluator.evaluator_errors import CancelledError
from understudy.evaluator.sharding.platform_facts import MixtureNotes
from understudy.evaluator.sharding.pool import (
    Event,
    Facts,
    Shard,
    ShardComputed,
    ShardResult,
    WorkerGone,
    WorkerPool,
    WorkerReady,
    WorkFailed,
)
from understudy.evaluator.sharding.schedule import Kill, ShardingError, ShardSchedule, WorkerTimeouts

_log = logging.getLogger(__name__)

_AHEAD = 2
"""How many shards a worker may be ahead of what was consumed, one in work included."""

_SPARE = 2
"""The window exceeds that by this many shards, so that one that is late does not stop the others at once."""

_CAPACITY_SECONDS = 2.0
"""How often it is checked how many workers there may be."""


_WANTED_SECONDS = 1.0
"""How often it is checked whether the results are still wanted while none arrives."""

_DESERTED_SECONDS = 300.0
"""How long machines may join again after the last one has left."""


class ShardCoordinator:
    """Computes shards on a pool with a bounded window, and yields their results in order. A context manager.

    Its thread drives the pool, so the workers compute while the consumer uses a result. The results that wait take at
    most the memory of `_AHEAD` shards for each worker, and `_SPARE` more.

    Args:
        shards: The shards, in order, with different indices.
        pool: Computes them. The coordinator closes it, unless it is to be kept.
        keeps_pool: Whether the pool is used again afterwards.
        timeouts: How long workers may take.
        facts: Those of the workers of earlier shards.
        clock: Returns seconds.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        pool: WorkerPool,
        *,
        keeps_pool: bool = False,
        timeouts: WorkerTimeouts | None = None,
        facts: Sequence[Facts] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards = shards
        self._places = {shard.index: place for place, shard in enumerate(shards)}
        self._pool = pool
        self._keeps_pool = keeps_pool
        self._clock = clock
        self._schedule = ShardSchedule(len(shards), window=_window(pool), timeouts=timeouts)
        self._staffed = clock()
        self._mixture = MixtureNotes()
        for each in facts:
            self._mixture.add(each)
        self._condition = threading.Condition()
        self._results: dict[int, ShardResult] = {}
        self._consumed = 0
        self._failure: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-shards")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def results(self, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[tuple[Shard, ShardResult]]:
        """Yield each shard and its result, in order. For one thread.

        Args:
            is_wanted: Called now and then; returns whether to continue.

        Raises:
            ShardingError: The workers cannot compute a shard, or returned too few or too many examples of it.
            CancelledError: The coordinator was closed, or the results are no longer wanted.
            Exception: The error that the model, the data or the pool have.
        """
        for shard in self._shards:
            with self._condition:
                while not self._condition.wait_for(self._has_news, _WANTED_SECONDS) and is_wanted():
                    pass
                if self._closing or not self._has_news():
                    raise CancelledError("the computation was cancelled; start it again")
                if self._consumed not in self._results:
                    raise self._failure or RuntimeError("the coordinator ended without a result")
                result = self._results.pop(self._consumed)
                self._consumed += 1
            self._pool.wake()
            computed = sum(batch.examples for batch in result)
            if computed != shard.examples:
                raise ShardingError(
                    f"a worker returned {computed} of the {shard.examples} examples from example {shard.first_example} "
                    "on; compare the versions of this project on all machines, and start the computation again"
                )
            yield shard, result

    def _has_news(self) -> bool:
        return self._consumed in self._results or self._failure is not None or self._closing

    @property
    def notes(self) -> Sequence[str]:
        """What is notable about where the shards were computed."""
        with self._condition:
            return self._mixture.notes

    @property
    def facts(self) -> Sequence[Facts]:
        """What the results of the workers so far depend on, each once."""
        with self._condition:
            return self._mixture.seen

    @property
    def repeated(self) -> int:
        """How many shards were given to a further worker, because one died or was late."""
        return self._schedule.repeated

    def close(self) -> None:
        """Cancel what is under way, end the workers, and join the thread. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._pool.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing and not self._schedule.is_finished:
                self._turn()
        except Exception as error:  # noqa: BLE001 - the consumer raises it
            with self._condition:
                self._failure = error
                self._condition.notify_all()
        finally:
            if not self._keeps_pool:
                self._pool.close()

    def _turn(self) -> None:
        now = self._clock()
        self._schedule.window = _window(self._pool)
        with self._condition:
            self._schedule.consumed(self._consumed)
        for action in self._schedule.decide(now):
            if isinstance(action, Kill):
                _log.warning("a worker is killed", extra={"worker": action.worker, "reason": action.reason})
                self._pool.kill(action.worker)
            else:
                self._pool.submit(action.worker, self._shards[action.shard])
        self._start_workers(now)
        timeout = min(self._schedule.next_change(now), _CAPACITY_SECONDS)
        for event in self._pool.wait(timeout):
            self._note(event)

    def _start_workers(self, now: float) -> None:
        """Start workers where there is room, and in place of those that are gone."""
        wanted = min(self._pool.capacity, len(self._shards) - self._consumed)
        for _ in range(wanted - self._schedule.workers):
            self._schedule.started(self._pool.start_worker(), now)
        if self._schedule.workers:
            self._staffed = now
        elif now - self._staffed > _DESERTED_SECONDS:
            raise ShardingError(f"there was no machine for a worker for {now - self._staffed:.0f} s")

    def _note(self, event: Event) -> None:
        now = self._clock()
        if isinstance(event, WorkerReady):
            with self._condition:
                self._mixture.add(event.facts)
            self._schedule.ready(event.worker, now)
        elif isinstance(event, ShardComputed):
            place = self._places[event.shard]
            if self._schedule.computed(event.worker, place, now):
                with self._condition:
                    self._results[place] = event.result
                    self._condition.notify_all()
        elif isinstance(event, WorkerGone):
            _log.warning("a worker ended", extra={"worker": event.worker, "reason": event.reason})
            self._schedule.gone(event.worker, event.reason)
        elif isinstance(event, WorkFailed):
            raise event.error


def _window(pool: WorkerPool) -> int:
    return _AHEAD * max(1, pool.capacity) + _SPARE
