"""When the serving version is frozen, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testkit.in_process import until
from understudy.evaluator.evaluator_errors import NotFrozenError, VersionNotFoundError
from understudy.evaluator.observer import FreezeOutcome, SilentObserver
from understudy.evaluator.serving.freezer import Freezer
from understudy.evaluator.serving.servable import Handle, Servable

WAIT_SECONDS = 30.0
NEVER_SECONDS = 1000.0
SIZE = 7


class ControlledSlot:
    """A slot whose freezing takes until `may_go_on` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.is_frozen = False

    def freeze(self, *, limit_mib: int, check_wanted: Callable[[], None]) -> int:
        assert limit_mib == 1
        self.began.set()
        while not self.may_go_on.wait(0.001):
            check_wanted()
        check_wanted()
        if self.error is not None:
            raise self.error
        self.is_frozen = True
        return SIZE

    def thaw(self) -> None:
        self.is_frozen = False


class Versions:
    """The loaded versions."""

    def __init__(self) -> None:
        self.slots: dict[int, ControlledSlot] = {}
        self.servables: dict[int, Servable] = {}
        self.reclaims = 0

    def add(self, step: int, error: Exception | None = None) -> ControlledSlot:
        slot: Any = ControlledSlot(error)
        self.slots[step] = slot
        self.servables[step] = Servable(step=step, digest="", slot=slot)
        return self.slots[step]

    def borrow(self, step: int | None = None) -> Handle:
        if step not in self.servables:
            raise VersionNotFoundError(f"version {step} is not loaded")
        return self.servables[step].borrow()

    def reclaim(self) -> None:
        self.reclaims += 1


class Events(SilentObserver):
    """Records the outcomes and the memory."""

    def __init__(self) -> None:
        self.outcomes: list[FreezeOutcome] = []
        self.memory = 0

    def freezing_ended(self, outcome: FreezeOutcome, *, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes.append(outcome)

    def frozen_memory_changed(self, size: int) -> None:
        self.memory = size


@pytest.fixture
def versions() -> Versions:
    return Versions()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def freezer(versions: Versions, events: Events) -> Iterator[Freezer]:
    freezer = Freezer(manager=versions, limit_mib=1, observer=events, settling_seconds=0.0)
    freezer.start()
    yield freezer
    freezer.close(WAIT_SECONDS)
    assert all(servable.handles == 0 for servable in versions.servables.values())


def test_the_serving_version_is_frozen_and_its_handle_released(
    freezer: Freezer, versions: Versions, events: Events
) -> None:
    slot = versions.add(1)
    freezer.promoted(1)
    assert slot.began.wait(WAIT_SECONDS)
    assert versions.servables[1].handles == 1
    slot.may_go_on.set()
    until(lambda: events.outcomes == ["frozen"])
    assert slot.is_frozen
    assert events.memory == SIZE
    assert versions.servables[1].handles == 0


def test_a_newer_version_cancels_the_work_and_is_frozen_itself(
    freezer: Freezer, versions: Versions, events: Events
) -> None:
    first, second = versions.add(1), versions.add(2)
    freezer.promoted(1)
    assert first.began.wait(WAIT_SECONDS)
    freezer.promoted(2)
    second.may_go_on.set()
    until(lambda: events.outcomes == ["cancelled", "frozen"])
    assert (first.is_frozen, second.is_frozen) == (False, True)


def test_the_constants_of_the_version_before_are_dropped(freezer: Freezer, versions: Versions, events: Events) -> None:
    first, second = versions.add(1), versions.add(2)
    first.may_go_on.set()
    freezer.promoted(1)
    until(lambda: events.outcomes == ["frozen"])
    freezer.promoted(2)
    assert second.began.wait(WAIT_SECONDS)
    assert not first.is_frozen
    assert events.memory == 0
    assert versions.reclaims == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(NotFrozenError("it has no variables"), "left"), (MemoryError("too large"), "failed")],
)
def test_a_version_that_is_not_frozen_ends_nothing(
    error: Exception, outcome: FreezeOutcome, freezer: Freezer, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    events: Any = freezer._observer
    first, second = versions.add(1, error), versions.add(2)
    for slot in (first, second):
        slot.may_go_on.set()
    freezer.promoted(1)
    until(lambda: events.outcomes == [outcome])
    until(lambda: versions.reclaims == 1)
    reasons = [getattr(record, "reason", None) for record in caplog.records]
    assert str(error) in reasons
    freezer.promoted(2)
    until(lambda: events.outcomes == [outcome, "frozen"])


def test_a_version_that_is_gone_is_passed_over(freezer: Freezer, versions: Versions, events: Events) -> None:
    freezer.promoted(1)
    until(lambda: events.outcomes == ["cancelled"])
    versions.add(2).may_go_on.set()
    freezer.promoted(2)
    until(lambda: events.outcomes == ["cancelled", "frozen"])


def test_no_work_is_begun_for_a_version_that_has_not_settled(versions: Versions, events: Events) -> None:
    freezer = Freezer(manager=versions, limit_mib=1, observer=events, settling_seconds=NEVER_SECONDS)
    freezer.start()
    slots = [versions.add(step) for step in (1, 2, 3)]
    for step in (1, 2, 3):
        freezer.promoted(step)
    freezer.close(WAIT_SECONDS)
    assert not any(slot.began.is_set() for slot in slots)
    assert events.outcomes == []


def test_closing_cancels_the_work(versions: Versions, events: Events) -> None:
    freezer = Freezer(manager=versions, limit_mib=1, observer=events, settling_seconds=0.0)
    freezer.start()
    slot = versions.add(1)
    freezer.promoted(1)
    assert slot.began.wait(WAIT_SECONDS)
    freezer.close(WAIT_SECONDS)
    freezer.close(WAIT_SECONDS)
    assert events.outcomes == ["cancelled"]
    assert not slot.is_frozen


def test_no_memory_means_no_thread(versions: Versions, events: Events) -> None:
    freezer = Freezer(manager=versions, limit_mib=0, observer=events, settling_seconds=0.0)
    freezer.start()
    freezer.promoted(1)
    assert not [thread for thread in threading.enumerate() if thread.name == "understudy-freeze"]
    freezer.close(WAIT_SECONDS)
    assert events.outcomes == []
