from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from testkit.engine_calls import predict_on
from testkit.text_lifecycle import WAIT_SECONDS, TextLifecycle
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.evaluator_errors import (
    DrainingError,
    NotReadyError,
    OverloadedError,
    VersionNotFoundError,
)
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.types import Array, VersionState


def test_nothing_can_be_borrowed_before_the_first_is_serving(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1)

    with pytest.raises(NotReadyError):
        lifecycle.manager.borrow()
    with pytest.raises(VersionNotFoundError, match=r"version 1 is not loaded; loaded are \[\]"):
        lifecycle.manager.borrow(1)


def test_a_promoted_checkpoint_is_loaded_warmed_up_and_serving(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1)
    lifecycle.promote(1)

    with lifecycle.manager.borrow() as handle:
        assert handle.step == 1
        assert handle.slot is lifecycle.built[0]
    assert lifecycle.built[0].warm_ups == 1
    assert lifecycle.promoted == [1]
    assert lifecycle.status(1).state is VersionState.AVAILABLE
    assert lifecycle.observer.outcomes == ["loaded"]


def test_slots_are_made_when_first_needed_and_used_again(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3, 4, 5)
    for step in (1, 2, 3, 4, 5):
        lifecycle.promote(step)

    assert len(lifecycle.built) == 3
    assert sum(slot.loads for slot in lifecycle.built) == 5
    assert lifecycle.loaded() == [3, 4, 5]


def test_rolling_back_to_the_predecessor_loads_nothing(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2)
    lifecycle.promote(1)
    lifecycle.promote(2)
    lifecycle.may_load.clear()

    future = lifecycle.manager.promote(1)

    assert future.done()
    future.result().release()
    with lifecycle.manager.borrow() as handle:
        assert handle.step == 1
    assert [slot.loads for slot in lifecycle.built] == [1, 1]


def test_rolling_back_does_not_wait_for_a_load_that_is_running(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3)
    lifecycle.promote(1)
    lifecycle.promote(2)
    lifecycle.may_load.clear()
    slow = lifecycle.manager.acquire(3)

    lifecycle.manager.promote(1).result(0).release()

    assert lifecycle.manager.serving is not None
    assert lifecycle.manager.serving.step == 1
    assert not slow.done()
    lifecycle.may_load.set()
    slow.result(WAIT_SECONDS).release()


def test_a_request_in_flight_keeps_what_it_borrowed(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3, 4)
    lifecycle.promote(1)
    handle = lifecycle.manager.borrow()
    for step in (2, 3, 4):
        lifecycle.promote(step)

    assert handle.slot.forward({"x": _rows(2)})["y"].tolist() == [[1.0], [1.0]]
    assert 1 in lifecycle.loaded()
    handle.release()


def _starve_the_fourth(lifecycle: TextLifecycle) -> tuple[list[Handle], Future[Handle]]:
    """Promote a fourth version while three are borrowed; return their handles, and its promotion, which waits."""
    lifecycle.publish(1, 2, 3, 4)
    handles = []
    for step in (1, 2, 3):
        lifecycle.promote(step)
        handles.append(lifecycle.manager.borrow())
    return handles, lifecycle.manager.promote(4)


def test_a_checkpoint_that_finds_no_slot_makes_itself_heard(lifecycle: TextLifecycle) -> None:
    handles, waiting = _starve_the_fourth(lifecycle)
    step, seconds, to_serve = lifecycle.starved.get(timeout=WAIT_SECONDS)
    assert (step, to_serve) == (4, True)
    assert 0 < seconds < WAIT_SECONDS
    handles[0].release()
    waiting.result(WAIT_SECONDS).release()
    for handle in handles:
        handle.release()


def test_callers_that_follow_each_other_keep_no_version_from_serving(lifecycle: TextLifecycle) -> None:
    handles, waiting = _starve_the_fourth(lifecycle)
    lifecycle.starved.get(timeout=WAIT_SECONDS)

    late = lifecycle.manager.acquire(1)
    assert not late.done()
    with pytest.raises(VersionNotFoundError, match="version 1 is not loaded"):
        lifecycle.manager.borrow(1)
    for handle in handles:
        handle.release()
        if handle.step == 1:
            assert waiting.result(WAIT_SECONDS).step == 4
    with late.result(WAIT_SECONDS) as again:
        assert again.step == 1
    waiting.result().release()


def test_a_on_demand_version_does_not_take_the_predecessors_slot(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3, 4)
    lifecycle.promote(3)
    lifecycle.promote(4)

    lifecycle.acquire(1).release()
    lifecycle.acquire(2).release()

    assert lifecycle.loaded() == [2, 3, 4]


def test_on_demand_versions_on_one_step_share_and_on_another_wait_in_line(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3)
    lifecycle.promote(3)
    first = lifecycle.acquire(1)
    second = lifecycle.acquire(1)
    other = lifecycle.manager.acquire(2)

    assert first.slot is second.slot
    first.release()
    assert not other.done()
    second.release()
    with other.result(WAIT_SECONDS) as handle:
        assert handle.step == 2


def test_whoever_waits_past_the_deadline_is_turned_away(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3)
    lifecycle.promote(3)
    on_demand = lifecycle.acquire(1)
    waiting = lifecycle.manager.acquire(2, deadline=lifecycle.clock.now + 5)

    lifecycle.clock.now += 6
    lifecycle.manager._pool.notify_idle()

    with pytest.raises(OverloadedError, match=r"no slot became free for step 2 .* the steps \[1, 3\]"):
        waiting.result(WAIT_SECONDS)
    on_demand.release()


def test_whoever_gives_up_waiting_leaves_the_line(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3)
    lifecycle.promote(3)
    on_demand = lifecycle.acquire(1)
    waiting = lifecycle.manager.acquire(2)

    assert waiting.cancel()
    on_demand.release()
    lifecycle.acquire(1).release()

    assert lifecycle.loaded() == [1, 3]


def test_the_next_serving_version_goes_before_on_demand_versions_in_line(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2, 3, 4)
    lifecycle.promote(1)
    lifecycle.may_load.clear()
    lifecycle.is_loading.clear()
    order: list[int] = []
    futures = [lifecycle.manager.acquire(2)]
    assert lifecycle.is_loading.wait(WAIT_SECONDS)
    futures += [lifecycle.manager.acquire(3), lifecycle.manager.promote(4)]
    for future in futures:
        future.add_done_callback(lambda done: _note(order, done.result()))
    lifecycle.may_load.set()
    for future in futures:
        future.result(WAIT_SECONDS)
    lifecycle.acquire(1).release()

    assert order == [2, 4, 3]


def test_with_two_slots_a_on_demand_version_takes_the_predecessors(
    make_lifecycle: Callable[..., TextLifecycle],
) -> None:
    lifecycle = make_lifecycle(slots=2)
    lifecycle.manager.start()
    lifecycle.publish(1, 2, 3)
    lifecycle.promote(2)
    lifecycle.promote(3)

    lifecycle.acquire(1).release()

    assert lifecycle.loaded() == [1, 3]
    assert lifecycle.manager.predecessor_step == 2
    lifecycle.promote(2)
    assert lifecycle.loaded() == [2, 3]


def test_closing_turns_away_those_in_line_and_ends_the_thread(make_lifecycle: Callable[..., TextLifecycle]) -> None:
    lifecycle = make_lifecycle()
    lifecycle.manager.start()
    lifecycle.publish(1, 2, 3)
    lifecycle.promote(1)
    on_demand = lifecycle.acquire(2)
    waiting = lifecycle.manager.acquire(3)
    closer = threading.Thread(target=lifecycle.manager.close, args=(WAIT_SECONDS,))
    closer.start()

    assert isinstance(waiting.exception(WAIT_SECONDS), DrainingError)
    on_demand.release()
    closer.join(WAIT_SECONDS)

    assert not closer.is_alive()
    with pytest.raises(DrainingError):
        lifecycle.manager.acquire(1)


def test_no_prediction_waits_for_a_load_that_is_running(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2)
    lifecycle.promote(1)
    lifecycle.may_load.clear()
    lifecycle.is_loading.clear()
    loading = lifecycle.manager.promote(2)
    assert lifecycle.is_loading.wait(WAIT_SECONDS)
    engine = Engine(EngineSettings(), SilentObserver())

    for _ in range(20):
        rows = lifecycle.manager.servable().slot.check_inputs({"x": _rows(3)})
        prediction = predict_on(engine, {"x": _rows(rows)}, borrow=lifecycle.manager.borrow, key="serving")
        assert prediction.result(WAIT_SECONDS).step == 1
    assert not loading.done()

    lifecycle.may_load.set()
    loading.result(WAIT_SECONDS).release()
    engine.close(WAIT_SECONDS)


def test_a_handle_that_comes_back_wakes_nobody_while_nobody_is_in_line(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1)
    lifecycle.promote(1)
    handle = lifecycle.manager.borrow()

    with lifecycle.manager._changed:  # nobody else can take it, so that who needs it here would wait for ever
        releaser = threading.Thread(target=handle.release, daemon=True)
        releaser.start()
        releaser.join(WAIT_SECONDS)
        assert not releaser.is_alive()


def test_a_handle_that_does_not_come_back_is_reported(make_lifecycle: Callable[..., TextLifecycle]) -> None:
    lifecycle = make_lifecycle()
    lifecycle.manager.start()
    lifecycle.publish(1)
    lifecycle.promote(1)
    handle = lifecycle.manager.borrow()

    lifecycle.clock.now += 1
    with pytest.raises(TimeoutError, match="1 handles on step 1"):
        lifecycle.manager.close(0.5)
    handle.release()


def _note(order: list[int], handle: Handle) -> None:
    order.append(handle.step)
    handle.release()


def _rows(count: int) -> Array:
    return np.zeros((count, 1), np.float32)


def test_the_life_of_a_checkpoint_tells_when_it_was_loaded_served_and_replaced(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2)
    for step in (1, 2, 1):
        lifecycle.promote(step)
        lifecycle.version_monitor.served(lifecycle.store.info(step))

    events = {step: [record.event.value for record in lifecycle.life.of_step(step)] for step in (1, 2)}
    assert events[1] == ["verified", "loaded", "warmed up", "served", "replaced", "served"]
    assert events[2] == ["verified", "loaded", "warmed up", "served", "replaced"]
