from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from paper_theatre import WAIT_SECONDS, PaperTheatre

from understudy.evaluator.compute.engine import Engine, EngineSettings
from understudy.evaluator.errors import (
    DrainingError,
    LoadError,
    NotReadyError,
    OutOfResourcesError,
    OverloadedError,
    VersionNotFoundError,
)
from understudy.evaluator.lifecycle.servable import Handle
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.types import Array, VersionState


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[PaperTheatre]:
    theatre = PaperTheatre(tmp_path)
    theatre.manager.start()
    yield theatre
    theatre.may_load.set()
    theatre.manager.close(WAIT_SECONDS)


def test_nothing_can_be_borrowed_before_the_first_is_on_stage(theatre: PaperTheatre) -> None:
    theatre.publish(1)

    with pytest.raises(NotReadyError):
        theatre.manager.borrow()
    with pytest.raises(VersionNotFoundError, match=r"version 1 is not loaded; loaded are \[\]"):
        theatre.manager.borrow(1)


def test_a_promoted_checkpoint_is_loaded_warmed_up_and_on_stage(theatre: PaperTheatre) -> None:
    theatre.publish(1)
    theatre.promote(1)

    with theatre.manager.borrow() as handle:
        assert handle.step == 1
        assert handle.slot is theatre.built[0]
    assert theatre.built[0].warm_ups == 1
    assert theatre.staged == [1]
    assert theatre.status(1).state is VersionState.AVAILABLE
    assert theatre.observer.outcomes == ["loaded"]


def test_slots_are_made_when_first_needed_and_used_again(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3, 4, 5)
    for step in (1, 2, 3, 4, 5):
        theatre.promote(step)

    assert len(theatre.built) == 3
    assert sum(slot.loads for slot in theatre.built) == 5
    assert theatre.loaded() == [3, 4, 5]


def test_rolling_back_to_the_predecessor_loads_nothing(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2)
    theatre.promote(1)
    theatre.promote(2)
    theatre.may_load.clear()

    future = theatre.manager.promote(1)

    assert future.done()
    future.result().release()
    with theatre.manager.borrow() as handle:
        assert handle.step == 1
    assert [slot.loads for slot in theatre.built] == [1, 1]


def test_rolling_back_does_not_wait_for_a_load_that_is_running(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3)
    theatre.promote(1)
    theatre.promote(2)
    theatre.may_load.clear()
    slow = theatre.manager.acquire(3)

    theatre.manager.promote(1).result(0).release()

    assert theatre.manager.stage is not None
    assert theatre.manager.stage.step == 1
    assert not slow.done()
    theatre.may_load.set()
    slow.result(WAIT_SECONDS).release()


def test_a_request_in_flight_keeps_what_it_borrowed(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3, 4)
    theatre.promote(1)
    handle = theatre.manager.borrow()
    for step in (2, 3, 4):
        theatre.promote(step)

    assert handle.slot.forward({"x": _rows(2)})["y"].tolist() == [[1.0], [1.0]]
    assert 1 in theatre.loaded()
    handle.release()


def test_a_checkpoint_that_finds_no_slot_makes_itself_heard(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3, 4)
    handles = []
    for step in (1, 2, 3):
        theatre.promote(step)
        handles.append(theatre.manager.borrow())
    waiting = theatre.manager.promote(4)
    step, seconds, to_serve = theatre.starved.get(timeout=WAIT_SECONDS)
    assert (step, to_serve) == (4, True)
    assert 0 < seconds < WAIT_SECONDS
    handles[0].release()
    waiting.result(WAIT_SECONDS).release()
    for handle in handles:
        handle.release()


def test_a_guest_does_not_take_the_predecessors_slot(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3, 4)
    theatre.promote(3)
    theatre.promote(4)

    theatre.acquire(1).release()
    theatre.acquire(2).release()

    assert theatre.loaded() == [2, 3, 4]


def test_guests_on_one_step_share_and_on_another_wait_in_line(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3)
    theatre.promote(3)
    first = theatre.acquire(1)
    second = theatre.acquire(1)
    other = theatre.manager.acquire(2)

    assert first.slot is second.slot
    first.release()
    assert not other.done()
    second.release()
    with other.result(WAIT_SECONDS) as handle:
        assert handle.step == 2


def test_whoever_waits_past_the_deadline_is_turned_away(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3)
    theatre.promote(3)
    guest = theatre.acquire(1)
    waiting = theatre.manager.acquire(2, deadline=theatre.clock.now + 5)

    theatre.clock.now += 6
    theatre.manager._reconsider()

    with pytest.raises(OverloadedError, match=r"no slot became free for step 2 .* the steps \[1, 3\]"):
        waiting.result(WAIT_SECONDS)
    guest.release()


def test_whoever_gives_up_waiting_leaves_the_line(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3)
    theatre.promote(3)
    guest = theatre.acquire(1)
    waiting = theatre.manager.acquire(2)

    assert waiting.cancel()
    guest.release()
    theatre.acquire(1).release()

    assert theatre.loaded() == [1, 3]


def test_the_next_on_stage_goes_before_guests_in_line(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2, 3, 4)
    theatre.promote(1)
    theatre.may_load.clear()
    theatre.is_loading.clear()
    order: list[int] = []
    futures = [theatre.manager.acquire(2)]
    assert theatre.is_loading.wait(WAIT_SECONDS)
    futures += [theatre.manager.acquire(3), theatre.manager.promote(4)]
    for future in futures:
        future.add_done_callback(lambda done: _note(order, done.result()))
    theatre.may_load.set()
    for future in futures:
        future.result(WAIT_SECONDS)
    theatre.acquire(1).release()

    assert order == [2, 4, 3]


def test_with_two_slots_a_guest_takes_the_predecessors(tmp_path: Path) -> None:
    theatre = PaperTheatre(tmp_path, slots=2)
    theatre.manager.start()
    theatre.publish(1, 2, 3)
    theatre.promote(2)
    theatre.promote(3)

    theatre.acquire(1).release()

    assert theatre.loaded() == [1, 3]
    assert theatre.manager.predecessor_step == 2
    theatre.promote(2)
    assert theatre.loaded() == [2, 3]
    theatre.manager.close(WAIT_SECONDS)


def test_a_bad_checkpoint_is_quarantined_and_the_one_on_stage_stays(theatre: PaperTheatre) -> None:
    theatre.publish(1)
    theatre.promote(1)
    theatre.publish(2, text="nonsense")

    with pytest.raises(LoadError, match=r"model\.keras is not a model"):
        theatre.promote(2)

    info = theatre.shelf.info(2)
    failure = theatre.quarantine.failure(info.key)
    assert failure is not None
    assert (failure.attempts, failure.given_up) == (1, False)
    assert "is not a model" in theatre.status(2).error
    assert theatre.status(2).state is VersionState.END
    assert theatre.observer.outcomes == ["loaded", "failed"]
    with theatre.manager.borrow() as handle:
        assert handle.step == 1


def test_a_slot_in_which_loading_failed_is_used_again(theatre: PaperTheatre) -> None:
    theatre.publish(1, 3)
    theatre.publish(2, text="net torn")
    theatre.promote(1)
    for _ in range(4):
        with pytest.raises(LoadError):
            theatre.promote(2)

    theatre.promote(3)

    assert len(theatre.built) == 2


def test_everyone_who_waits_for_a_bad_checkpoint_is_told(theatre: PaperTheatre) -> None:
    theatre.publish(1)
    theatre.publish(2, text="net torn")
    theatre.may_load.clear()
    running = theatre.manager.promote(1)
    futures = [theatre.manager.acquire(2), theatre.manager.acquire(2)]
    theatre.may_load.set()

    running.result(WAIT_SECONDS).release()
    for future in futures:
        assert isinstance(future.exception(WAIT_SECONDS), LoadError)
    assert theatre.observer.outcomes == ["loaded", "failed"]


def test_another_architecture_is_loaded_beside_the_serving_one_and_takes_its_place(theatre: PaperTheatre) -> None:
    theatre.publish(1, 3)
    theatre.publish(2, text="bignet 2")
    theatre.promote(1)
    theatre.acquire(2).release()
    assert theatre.loaded() == [1, 2]

    for step, architecture in ((2, "bignet"), (3, "net"), (1, "net"), (2, "bignet")):
        theatre.promote(step)
        with theatre.manager.borrow() as handle:
            assert (handle.step, handle.slot.architecture) == (step, architecture)


def test_a_slot_that_does_not_take_the_weights_all_the_same_gives_way_to_a_new_one(theatre: PaperTheatre) -> None:
    def refuse(model_file: Path) -> bool:
        raise LoadError(f"{model_file.name} has other shapes")

    theatre.publish(1, 2, 3)
    theatre.promote(1)
    theatre.acquire(2).release()
    theatre.built[1].load = refuse  # type: ignore[method-assign]
    theatre.acquire(3).release()

    assert theatre.loaded() == [1, 3]
    assert len(theatre.built) == 3


def test_a_checkpoint_deleted_before_it_is_read_is_given_up(theatre: PaperTheatre) -> None:
    theatre.publish(1)
    for file in theatre.run.checkpoint(1).iterdir():
        file.unlink()
    theatre.run.checkpoint(1).rmdir()

    with pytest.raises(LoadError, match="deleted before it could be taken"):
        theatre.promote(1)


def test_when_memory_runs_out_a_guest_goes_then_the_predecessor_then_the_newcomer(tmp_path: Path) -> None:
    theatre = PaperTheatre(tmp_path, memory=2)
    theatre.manager.start()
    theatre.publish(1, 2, 3, 4)
    theatre.promote(1)
    theatre.promote(2)
    theatre.promote(3)
    assert theatre.loaded() == [2, 3]
    theatre.acquire(1).release()
    theatre.promote(4)
    assert theatre.loaded() == [3, 4]
    theatre.manager.close(WAIT_SECONDS)


def test_with_memory_for_one_the_newcomer_waits_and_is_never_given_up(tmp_path: Path) -> None:
    theatre = PaperTheatre(tmp_path, memory=1)
    theatre.manager.start()
    theatre.publish(1, 2)
    theatre.promote(1)
    key = next(info.key for info in theatre.shelf.checkpoints() if info.step == 2)

    for _ in range(5):
        with pytest.raises(OutOfResourcesError, match="step 2 waits until the machine has room for it"):
            theatre.promote(2)
        assert not theatre.quarantine.admits(key)
        theatre.clock.now += 60
        assert theatre.quarantine.admits(key)
    failure = theatre.quarantine.failure(key)
    assert failure is not None
    assert (failure.attempts, failure.given_up, failure.postponed) == (0, False, 5)
    assert (theatre.loaded(), theatre.status(2).state) == ([1], VersionState.START)
    theatre.memory = 2
    theatre.promote(2)
    assert theatre.loaded() == [1, 2]
    assert theatre.observer.outcomes == ["loaded", *["postponed"] * 5, "loaded"]
    theatre.manager.close(WAIT_SECONDS)


def test_a_slot_that_has_no_memory_to_load_into_is_given_up_and_then_the_predecessors(tmp_path: Path) -> None:
    theatre = PaperTheatre(tmp_path)
    theatre.manager.start()
    theatre.publish(1, 2, 3, 4)
    for step in (1, 2, 3):
        theatre.promote(step)
    theatre.out_of_memory_while_slots_exceed = 1

    theatre.promote(4)

    assert theatre.loaded() == [3, 4]
    assert theatre.observer.outcomes == ["loaded"] * 4
    assert theatre.reclaimed == 1
    theatre.manager.close(WAIT_SECONDS)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.EIO])
def test_what_the_machine_lacks_costs_a_checkpoint_no_attempt(theatre: PaperTheatre, number: int) -> None:
    theatre.publish(1, 2)
    theatre.promote(1)
    theatre.load_fails_with = OSError(number, os.strerror(number))
    for _ in range(5):
        with pytest.raises(OutOfResourcesError, match=os.strerror(number)):
            theatre.promote(2)
    theatre.load_fails_with = None

    theatre.promote(2)

    assert theatre.loaded() == [1, 2]
    assert "failed" not in theatre.observer.outcomes


def test_an_unknown_step_is_refused_by_the_known_ones(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2)

    with pytest.raises(VersionNotFoundError, match=r"no checkpoint of step 9; there are \[1, 2\]"):
        theatre.manager.acquire(9)


def test_closing_turns_away_those_in_line_and_ends_the_thread(tmp_path: Path) -> None:
    theatre = PaperTheatre(tmp_path)
    theatre.manager.start()
    theatre.publish(1, 2, 3)
    theatre.promote(1)
    guest = theatre.acquire(2)
    waiting = theatre.manager.acquire(3)
    closer = threading.Thread(target=theatre.manager.close, args=(WAIT_SECONDS,))
    closer.start()

    assert isinstance(waiting.exception(WAIT_SECONDS), DrainingError)
    guest.release()
    closer.join(WAIT_SECONDS)

    assert not closer.is_alive()
    with pytest.raises(DrainingError):
        theatre.manager.acquire(1)


def test_no_prediction_waits_for_a_load_that_is_running(theatre: PaperTheatre) -> None:
    theatre.publish(1, 2)
    theatre.promote(1)
    theatre.may_load.clear()
    theatre.is_loading.clear()
    loading = theatre.manager.promote(2)
    assert theatre.is_loading.wait(WAIT_SECONDS)
    engine = Engine(EngineSettings(), SilentObserver())

    for _ in range(20):
        rows = theatre.manager.servable().slot.check_inputs({"x": _rows(3)})
        prediction = engine.predict({"x": _rows(rows)}, borrow=theatre.manager.borrow, key="serving")
        assert prediction.result(WAIT_SECONDS).step == 1
    assert not loading.done()

    theatre.may_load.set()
    loading.result(WAIT_SECONDS).release()
    engine.close(WAIT_SECONDS)


def test_a_handle_that_comes_back_wakes_nobody_while_nobody_is_in_line(theatre: PaperTheatre) -> None:
    theatre.publish(1)
    theatre.promote(1)
    handle = theatre.manager.borrow()

    with theatre.manager._changed:  # nobody else can take it, so that who needs it here would wait for ever
        releaser = threading.Thread(target=handle.release, daemon=True)
        releaser.start()
        releaser.join(WAIT_SECONDS)
        assert not releaser.is_alive()


def test_a_handle_that_does_not_come_back_is_reported(tmp_path: Path) -> None:
    theatre = PaperTheatre(tmp_path)
    theatre.manager.start()
    theatre.publish(1)
    theatre.promote(1)
    handle = theatre.manager.borrow()

    theatre.clock.now += 1
    with pytest.raises(TimeoutError, match="1 handles on step 1"):
        theatre.manager.close(0.5)
    handle.release()
    theatre.manager.close(WAIT_SECONDS)


def _note(order: list[int], handle: Handle) -> None:
    order.append(handle.step)
    handle.release()


def _rows(count: int) -> Array:
    return np.zeros((count, 1), np.float32)
