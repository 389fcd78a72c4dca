from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from paper_theatre import WAIT_SECONDS, PaperTheatre

from understudy.evaluator.errors import CancelledError, LoadError, NotReadyError, StorageError, VersionNotFoundError
from understudy.evaluator.lifecycle.director import StageDirector
from understudy.evaluator.lifecycle.pin import PIN_FILE, PinFile
from understudy.evaluator.lifecycle.promotion import Ranking


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[PaperTheatre]:
    theatre = PaperTheatre(tmp_path)
    theatre.manager.start()
    yield theatre
    theatre.may_load.set()
    theatre.manager.close(WAIT_SECONDS)


@pytest.fixture
def director(theatre: PaperTheatre, tmp_path: Path) -> StageDirector:
    return direct(theatre, tmp_path)


def direct(theatre: PaperTheatre, folder: Path) -> StageDirector:
    return StageDirector(
        policy="latest",
        shelf=theatre.shelf,
        quarantine=theatre.quarantine,
        ranking=Ranking(None),
        gatekeeper=None,
        manager=theatre.manager,
        pin_file=PinFile(folder),
        on_settled=lambda: None,
    )


def stage(theatre: PaperTheatre) -> int:
    with theatre.manager.borrow() as handle:
        return handle.step


def settle(theatre: PaperTheatre, director: StageDirector) -> None:
    """Let the director reconsider, and wait until what it began is over."""
    director.reconsider()
    if director._under_way is not None and not director._under_way.cancelled():
        director._under_way.exception(WAIT_SECONDS)
    assert theatre.shelf.checkpoints()


def test_the_latest_goes_on_stage(theatre: PaperTheatre, director: StageDirector) -> None:
    theatre.publish(1, 2)
    settle(theatre, director)
    assert stage(theatre) == 2
    theatre.publish(3)
    settle(theatre, director)
    assert stage(theatre) == 3
    assert theatre.staged == [2, 3]


def test_with_the_latest_in_quarantine_the_one_before_goes_on_stage(
    theatre: PaperTheatre, director: StageDirector
) -> None:
    theatre.publish(1)
    theatre.publish(2, text="nonsense")
    settle(theatre, director)
    settle(theatre, director)

    assert stage(theatre) == 1
    theatre.clock.now += 1
    assert director.target() == 2


def test_a_pin_keeps_a_newer_checkpoint_off_the_stage(
    theatre: PaperTheatre, director: StageDirector, tmp_path: Path
) -> None:
    theatre.publish(1, 2)
    settle(theatre, director)
    change = director.pin(1).result(WAIT_SECONDS)
    theatre.publish(3)
    settle(theatre, director)

    assert (change.serving_step, change.previous_step, change.pinned_step) == (1, 2, 1)
    assert stage(theatre) == 1
    assert direct(theatre, tmp_path).pinned_step == 1


def test_a_pin_overtakes_a_promotion_that_is_still_loading(theatre: PaperTheatre, director: StageDirector) -> None:
    theatre.publish(1)
    settle(theatre, director)
    theatre.publish(2)
    theatre.may_load.clear()
    theatre.is_loading.clear()
    director.reconsider()
    assert theatre.is_loading.wait(WAIT_SECONDS)

    assert director.pin(1).result(0).serving_step == 1
    theatre.may_load.set()
    theatre.acquire(2).release()

    assert stage(theatre) == 1
    assert theatre.staged == [1]


def test_of_two_decisions_the_later_stands(theatre: PaperTheatre, director: StageDirector) -> None:
    theatre.publish(1, 2, 3)
    settle(theatre, director)
    theatre.may_load.clear()
    first = director.pin(1)
    second = director.pin(3)
    theatre.may_load.set()

    with pytest.raises(CancelledError, match="overtaken by another"):
        first.result(WAIT_SECONDS)
    assert second.result(WAIT_SECONDS).pinned_step == 3
    assert stage(theatre) == 3


def test_a_pin_that_fails_leaves_the_one_before(theatre: PaperTheatre, director: StageDirector) -> None:
    theatre.publish(1, 2)
    theatre.publish(3, text="net torn")
    director.pin(1).result(WAIT_SECONDS)

    with pytest.raises(LoadError):
        director.pin(3).result(WAIT_SECONDS)
    with pytest.raises(VersionNotFoundError):
        director.pin(9)

    assert director.pinned_step == 1
    assert stage(theatre) == 1


def test_a_pin_that_cannot_be_written_down_is_reported(
    theatre: PaperTheatre, director: StageDirector, tmp_path: Path
) -> None:
    theatre.publish(1)
    (tmp_path / PIN_FILE).mkdir()

    with pytest.raises(StorageError, match=r"pin\.json cannot be written"):
        director.pin(1).result(WAIT_SECONDS)
    assert director.pinned_step is None


def test_rolling_back_twice_returns_to_where_it_was(theatre: PaperTheatre, director: StageDirector) -> None:
    theatre.publish(1)
    settle(theatre, director)
    theatre.publish(2)
    settle(theatre, director)

    assert director.roll_back().result(0).serving_step == 1
    assert director.roll_back().result(0).serving_step == 2
    assert director.unpin().result(0).pinned_step is None


def test_taking_back_a_pin_with_nothing_on_stage_says_so(theatre: PaperTheatre, director: StageDirector) -> None:
    with pytest.raises(NotReadyError):
        director.unpin()
    assert theatre.staged == []
