"""Which worker computes which shard: each counts once, in a bounded window, whatever dies, hangs or is late."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.evaluator.sharding.schedule import (
    MAX_ATTEMPTS,
    MAX_FAILED_STARTS,
    Kill,
    ShardingError,
    ShardSchedule,
    Submit,
    WorkerTimeouts,
)

FAST = WorkerTimeouts(least=2.0, first=10.0, times=4.0, start=30.0)


def started(schedule: ShardSchedule, workers: int, now: float = 0.0) -> None:
    for worker in range(workers):
        schedule.started(worker, now)
        schedule.ready(worker, now)


class Simulation:
    """Workers that compute, die and hang as told, and a consumer that takes every result at once."""

    def __init__(self, shards: int, workers: int, window: int) -> None:
        self.schedule = ShardSchedule(shards, window=window, timeouts=FAST)
        self.busy: dict[int, int] = {}
        self.counted: list[int] = []
        self._faults: Counter[int] = Counter()
        self._names = itertools.count()
        self._workers = workers
        self._now = 0.0

    def act(self) -> None:
        while self.schedule.workers < self._workers:
            worker = next(self._names)
            self.schedule.started(worker, self._now)
            self.schedule.ready(worker, self._now)
        for action in self.schedule.decide(self._now):
            if isinstance(action, Submit):
                assert action.worker not in self.busy
                self.busy[action.worker] = action.shard
            else:
                self.busy.pop(action.worker, None)

    def happen(self, worker: int, fault: str) -> None:
        shard = self.busy[worker]
        if self._faults[shard] >= MAX_ATTEMPTS - 2:
            fault = "none"
        self._faults[shard] += fault != "none"
        if fault == "hang":
            self._now += 2.5  # what is late may be overtaken or killed
            return
        self._now += 0.1
        del self.busy[worker]
        if fault == "death":
            self.schedule.gone(worker, "killed")
        elif self.schedule.computed(worker, shard, self._now):
            self.counted.append(shard)
        done = itertools.takewhile(set(self.counted).__contains__, itertools.count())
        self.schedule.consumed(sum(1 for _ in done))


@settings(max_examples=50)
@given(data=st.data(), shards=st.integers(1, 30), workers=st.integers(1, 5), ahead=st.integers(0, 6))
def test_every_shard_counts_once_and_the_window_holds_whatever_dies_or_hangs(
    data: st.DataObject, shards: int, workers: int, ahead: int
) -> None:
    simulation = Simulation(shards, workers, window=workers + ahead)
    for _ in range(100 * shards):
        if simulation.schedule.is_finished:
            break
        simulation.act()
        assert simulation.schedule.begun <= workers + ahead
        if simulation.busy:
            worker = data.draw(st.sampled_from(sorted(simulation.busy)))
            simulation.happen(worker, data.draw(st.sampled_from(["none", "none", "death", "hang"])))
    assert simulation.schedule.is_finished
    assert sorted(simulation.counted) == list(range(shards))


def test_the_shard_of_a_dead_worker_goes_before_new_ones() -> None:
    schedule = ShardSchedule(9, window=9, timeouts=FAST)
    started(schedule, 2)
    assert schedule.decide(0.0) == [Submit(0, 0), Submit(1, 1)]
    schedule.gone(0, "killed")
    schedule.computed(1, 1, 1.0)
    assert schedule.decide(1.0) == [Submit(1, 0)]


def test_a_late_shard_is_given_to_a_second_worker_and_the_first_result_counts() -> None:
    schedule = ShardSchedule(3, window=3, timeouts=FAST)
    started(schedule, 2)
    schedule.decide(0.0)
    assert schedule.computed(1, 1, 0.5)
    assert schedule.decide(0.5) == [Submit(1, 2)]
    assert schedule.computed(1, 2, 1.0)
    assert not schedule.decide(1.9)
    assert schedule.next_change(1.9) == pytest.approx(0.1)
    assert schedule.decide(2.0) == [Submit(1, 0)]
    assert schedule.computed(1, 0, 2.5)
    assert not schedule.computed(0, 0, 2.6)
    assert schedule.is_finished


def test_a_worker_that_hangs_is_killed_and_the_next_one_is_waited_for_longer() -> None:
    schedule = ShardSchedule(2, window=2, timeouts=FAST)
    started(schedule, 1)
    assert schedule.decide(0.0) == [Submit(0, 0)]
    assert schedule.computed(0, 0, 0.5)
    assert schedule.decide(1.0) == [Submit(0, 1)]
    assert not schedule.decide(4.9)
    assert schedule.decide(5.0) == [Kill(0, "shard 1 took 4.0 s")]
    assert schedule.workers == 0
    schedule.started(1, 5.0)
    schedule.ready(1, 6.0)
    assert schedule.decide(6.0) == [Submit(1, 1)]
    assert not schedule.decide(13.9)
    assert [type(action) for action in schedule.decide(14.0)] == [Kill]


def test_a_shard_on_which_every_worker_dies_fails_with_the_last_reason() -> None:
    schedule = ShardSchedule(1, window=1, timeouts=FAST)
    for worker in range(MAX_ATTEMPTS - 1):
        schedule.started(worker, 0.0)
        schedule.ready(worker, 0.0)
        schedule.decide(0.0)
        schedule.gone(worker, "killed")
    started(schedule, 1)
    schedule.decide(0.0)
    with pytest.raises(ShardingError, match=r"4 workers ended on shard 0: out of memory"):
        schedule.gone(0, "out of memory")


def test_workers_that_never_become_ready_fail_the_work() -> None:
    schedule = ShardSchedule(1, window=1, timeouts=FAST)
    for worker in range(MAX_FAILED_STARTS - 1):
        schedule.started(worker, 0.0)
        schedule.gone(worker, "no TensorFlow")
    schedule.started(9, 0.0)
    with pytest.raises(ShardingError, match="3 workers in a row ended before they were ready: it was not ready"):
        schedule.decide(30.0)
