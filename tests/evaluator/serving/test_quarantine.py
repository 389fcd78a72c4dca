from __future__ import annotations

import contextlib
from pathlib import Path

from understudy.evaluator.observer import Milestone, SilentObserver
from understudy.evaluator.records.life_log import LifeLog
from understudy.evaluator.serving.quarantine import Failure, Quarantine
from understudy.evaluator.serving.version_monitor import VersionStateMonitor
from understudy.evaluator.step_changes import ChangedSteps, StepChanges
from understudy.evaluator.types import CheckpointInfo

A, B = (1, "a"), (2, "b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_whoever_never_failed_is_admitted() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())

    assert quarantine.admits(A)
    assert quarantine.failure(A) is None
    assert quarantine.seconds_to_next_retry() is None


def test_the_wait_doubles_until_it_is_given_up() -> None:
    clock = Clock()
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=clock)

    assert quarantine.add(A, "torn") == Failure(reason="torn", attempts=1, retry_at=101.0)
    assert not quarantine.admits(A)
    assert quarantine.seconds_to_next_retry() == 1.0
    clock.now = 101.0
    assert quarantine.admits(A)
    assert quarantine.add(A, "torn").retry_at == 103.0
    clock.now = 103.0
    assert quarantine.add(A, "still torn") == Failure(reason="still torn", attempts=3, retry_at=None)
    clock.now = 1e9
    assert not quarantine.admits(A)
    assert quarantine.seconds_to_next_retry() is None


def test_the_permanent_are_given_up_at_once() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())

    assert quarantine.add(A, "gone", permanent=True).given_up
    assert quarantine.admits(B)


def test_a_success_clears_the_record() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())
    quarantine.add(A, "torn")

    quarantine.clear(A)

    assert quarantine.admits(A)


def test_of_a_retry_that_is_due_is_told_once() -> None:
    clock = Clock()
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=clock)
    changed = ChangedSteps(quarantine.changes)
    quarantine.add(A, "torn")
    quarantine.add(B, "gone", permanent=True)
    assert taken(changed) == [1, 2]
    quarantine.note_due()
    assert taken(changed) == []
    clock.now += 1
    assert quarantine.seconds_to_next_retry() == 0
    quarantine.note_due()
    quarantine.note_due()
    assert taken(changed) == [1]
    assert quarantine.seconds_to_next_retry() is None, "it may never be tried"
    quarantine.clear(A)
    assert taken(changed) == [1]


def taken(changed: ChangedSteps) -> list[int]:
    with changed.read() as steps:
        return steps


def test_a_reason_that_quotes_a_name_that_is_no_text_is_text() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())
    for note in (quarantine.add, quarantine.postpone):
        assert note((1, "d"), "caf\udce9.keras is damaged").reason == "caf\\udce9.keras is damaged"


def test_what_changed_stays_changed_if_it_could_not_be_taken_in() -> None:
    changes = StepChanges()
    changed = ChangedSteps(changes)
    changes.note(3, 1)
    with contextlib.suppress(OSError), changed.read():
        changes.note(2)
        raise OSError("the disk is full")
    assert taken(changed) == [1, 2, 3]


def _info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, created_at=float(step), digest=str(step), final=False)


class Milestones(SilentObserver):
    def __init__(self) -> None:
        self.told: list[tuple[Milestone, float]] = []

    def checkpoint_reached(self, milestone: Milestone, *, seconds: float) -> None:
        self.told.append((milestone, seconds))


def test_how_long_a_checkpoint_took_is_told_once_unless_it_was_there_before() -> None:
    clock, observer = Clock(), Milestones()
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=clock)
    life = LifeLog(Path(":memory:"), clock=clock)
    monitor = VersionStateMonitor(
        quarantine=quarantine, observer=observer, life=life, is_offered=lambda _: True, clock=clock
    )
    clock.now = 130.0

    for reached in (monitor.scored, monitor.served):
        reached(_info(99))
        reached(_info(110))
    monitor.served(_info(99))
    monitor.served(_info(110))
    monitor.scored(_info(200))

    life.close()
    assert observer.told == [("scored", 20.0), ("served", 20.0), ("scored", 0.0)]
