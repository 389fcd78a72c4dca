from __future__ import annotations

from pathlib import Path

from understudy.evaluator.observer import Milestone, SilentObserver
from understudy.evaluator.records.life_log import LifeLog
from understudy.evaluator.serving.version_monitor import Backlog, Failure, Quarantine, VersionStateMonitor
from understudy.evaluator.types import CheckpointInfo


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_whoever_never_failed_is_admitted() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())

    assert quarantine.admits("a")
    assert quarantine.failure("a") is None
    assert quarantine.seconds_to_next_retry() is None


def test_the_wait_doubles_until_it_is_given_up() -> None:
    clock = Clock()
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=clock)

    assert quarantine.add("a", "torn") == Failure(reason="torn", attempts=1, retry_at=101.0)
    assert not quarantine.admits("a")
    assert quarantine.seconds_to_next_retry() == 1.0
    clock.now = 101.0
    assert quarantine.admits("a")
    assert quarantine.add("a", "torn").retry_at == 103.0
    clock.now = 103.0
    assert quarantine.add("a", "still torn") == Failure(reason="still torn", attempts=3, retry_at=None)
    clock.now = 1e9
    assert not quarantine.admits("a")
    assert quarantine.seconds_to_next_retry() is None


def test_the_permanent_are_given_up_at_once() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())

    assert quarantine.add("a", "gone", permanent=True).given_up
    assert quarantine.admits("b")


def test_a_success_clears_the_record() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())
    quarantine.add("a", "torn")

    quarantine.clear("a")

    assert quarantine.admits("a")


def _info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, created_at=float(step), digest=str(step), final=False)


def test_the_latest_policy_skips_what_is_older_than_the_checkpoint_being_evaluated() -> None:
    # The watcher may run out of time while it records the skipped ones; it offers those again that it did not record.
    backlog = Backlog("latest")
    assert backlog.offer([_info(30), _info(40), _info(50)]) == [_info(30), _info(40)]
    assert backlog.next() == _info(50)
    assert backlog.offer([_info(40), _info(50)]) == [_info(40)]
    backlog.finished()
    assert backlog.offer([_info(60)]) == []
    assert backlog.next() == _info(60)


def test_the_latest_policy_keeps_what_is_newer_than_the_checkpoint_being_evaluated() -> None:
    backlog = Backlog("latest")
    backlog.offer([_info(10)])
    assert backlog.next() == _info(10)
    assert backlog.offer([_info(10), _info(20), _info(30)]) == [_info(20)]
    backlog.finished()
    assert backlog.next() == _info(30)


class Milestones(SilentObserver):
    def __init__(self) -> None:
        self.told: list[tuple[Milestone, float]] = []

    def checkpoint_reached(self, milestone: Milestone, *, seconds: float) -> None:
        self.told.append((milestone, seconds))


def test_how_long_a_checkpoint_took_is_told_once_unless_it_was_there_before() -> None:
    clock, observer = Clock(), Milestones()
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=clock)
    life = LifeLog(Path(":memory:"), clock=clock)
    monitor = VersionStateMonitor(quarantine=quarantine, observer=observer, life=life, clock=clock)
    clock.now = 130.0

    for reached in (monitor.scored, monitor.served):
        reached(_info(99))
        reached(_info(110))
    monitor.served(_info(99))
    monitor.served(_info(110))
    monitor.scored(_info(200))

    life.close()
    assert observer.told == [("scored", 20.0), ("served", 20.0), ("scored", 0.0)]


def test_the_checkpoint_that_is_being_evaluated_counts_as_waiting() -> None:
    backlog = Backlog("every")
    backlog.offer([_info(1), _info(2)])
    assert len(backlog) == 2
    backlog.next()
    assert len(backlog) == 2
    backlog.finished()
    assert len(backlog) == 1
