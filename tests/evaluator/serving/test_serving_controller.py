from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from testkit.text_lifecycle import WAIT_SECONDS, TextLifecycle
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    LoadError,
    NotReadyError,
    StorageError,
    VersionNotFoundError,
)
from understudy.evaluator.serving.promotion import PIN_FILE, Pin, PinFile
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.serving_controller import ServingController
from understudy.evaluator.serving.serving_history import ServingHistory
from understudy.evaluator.serving.serving_target import ServingTarget


@pytest.fixture
def controller(lifecycle: TextLifecycle, tmp_path: Path) -> ServingController:
    return direct(lifecycle, tmp_path)


def direct(lifecycle: TextLifecycle, folder: Path) -> ServingController:
    ranking, pin, history = Ranking(None), Pin(PinFile(folder)), ServingHistory(folder)
    target = ServingTarget(
        policy="latest",
        store=lifecycle.store,
        quarantine=lifecycle.quarantine,
        ranking=ranking,
        gatekeeper=None,
        manager=lifecycle.manager,
        pin=pin,
        history=history,
    )
    return ServingController(
        target=target,
        store=lifecycle.store,
        ranking=ranking,
        manager=lifecycle.manager,
        pin=pin,
        history=history,
        latest_step=lambda: lifecycle.version_monitor.latest_step,
        on_settled=lambda: None,
    )


def serving(lifecycle: TextLifecycle) -> int:
    with lifecycle.manager.borrow() as handle:
        return handle.step


def settle(lifecycle: TextLifecycle, controller: ServingController) -> None:
    """Let the serving controller reconsider, and wait until what it began is over."""
    controller.reconcile()
    if controller._under_way is not None and not controller._under_way.cancelled():
        controller._under_way.exception(WAIT_SECONDS)
    assert lifecycle.store.checkpoints()


def test_the_latest_starts_serving(lifecycle: TextLifecycle, controller: ServingController) -> None:
    lifecycle.publish(1, 2)
    settle(lifecycle, controller)
    assert serving(lifecycle) == 2
    lifecycle.publish(3)
    settle(lifecycle, controller)
    assert serving(lifecycle) == 3
    assert lifecycle.promoted == [2, 3]


def test_with_the_latest_in_quarantine_the_one_before_starts_serving(
    lifecycle: TextLifecycle, controller: ServingController
) -> None:
    lifecycle.publish(1)
    lifecycle.publish(2, text="nonsense")
    settle(lifecycle, controller)
    settle(lifecycle, controller)

    assert serving(lifecycle) == 1
    lifecycle.clock.now += 1
    assert controller._target.step() == 2


def test_a_pin_keeps_a_newer_checkpoint_out_of_serving(
    lifecycle: TextLifecycle, controller: ServingController, tmp_path: Path
) -> None:
    lifecycle.publish(1, 2)
    settle(lifecycle, controller)
    change = controller.pin(1).result(WAIT_SECONDS)
    lifecycle.publish(3)
    settle(lifecycle, controller)

    assert (change.serving_step, change.previous_step, change.pinned_step) == (1, 2, 1)
    assert serving(lifecycle) == 1
    assert direct(lifecycle, tmp_path).pinned_step == 1


def test_a_pin_overtakes_a_promotion_that_is_still_loading(
    lifecycle: TextLifecycle, controller: ServingController
) -> None:
    lifecycle.publish(1)
    settle(lifecycle, controller)
    lifecycle.publish(2)
    lifecycle.may_load.clear()
    lifecycle.is_loading.clear()
    controller.reconcile()
    assert lifecycle.is_loading.wait(WAIT_SECONDS)

    assert controller.pin(1).result(0).serving_step == 1
    lifecycle.may_load.set()
    lifecycle.acquire(2).release()

    assert serving(lifecycle) == 1
    assert lifecycle.promoted == [1]


def test_of_two_decisions_the_later_stands(lifecycle: TextLifecycle, controller: ServingController) -> None:
    lifecycle.publish(1, 2, 3)
    settle(lifecycle, controller)
    lifecycle.may_load.clear()
    first = controller.pin(1)
    second = controller.pin(3)
    lifecycle.may_load.set()

    with pytest.raises(CancelledError, match="superseded by another"):
        first.result(WAIT_SECONDS)
    assert second.result(WAIT_SECONDS).pinned_step == 3
    assert serving(lifecycle) == 3


def test_a_pin_that_fails_leaves_the_one_before(lifecycle: TextLifecycle, controller: ServingController) -> None:
    lifecycle.publish(1, 2)
    lifecycle.publish(3, text="net torn")
    controller.pin(1).result(WAIT_SECONDS)

    with pytest.raises(LoadError):
        controller.pin(3).result(WAIT_SECONDS)
    with pytest.raises(VersionNotFoundError):
        controller.pin(9)

    assert controller.pinned_step == 1
    assert serving(lifecycle) == 1


def test_a_pin_that_cannot_be_written_down_is_reported(
    lifecycle: TextLifecycle, controller: ServingController, tmp_path: Path
) -> None:
    lifecycle.publish(1)
    (tmp_path / PIN_FILE).mkdir()

    with pytest.raises(StorageError, match=r"pin\.json cannot be written"):
        controller.pin(1).result(WAIT_SECONDS)
    assert controller.pinned_step is None


def test_removing_a_pin_with_nothing_serving_says_so(lifecycle: TextLifecycle, controller: ServingController) -> None:
    with pytest.raises(NotReadyError):
        controller.unpin()
    assert lifecycle.promoted == []


def test_the_same_pin_twice_while_it_loads_is_kept(
    lifecycle: TextLifecycle, controller: ServingController, tmp_path: Path
) -> None:
    lifecycle.publish(1)
    settle(lifecycle, controller)
    lifecycle.publish(2)
    lifecycle.may_load.clear()
    lifecycle.is_loading.clear()
    first = controller.pin(2)
    assert lifecycle.is_loading.wait(WAIT_SECONDS)
    second = controller.pin(2)
    lifecycle.may_load.set()

    assert second.result(WAIT_SECONDS).pinned_step == 2
    with pytest.raises(CancelledError, match="superseded by another"):
        first.result(WAIT_SECONDS)
    assert controller.pinned_step == 2
    assert direct(lifecycle, tmp_path).pinned_step == 2


def test_a_pin_that_fails_leaves_the_last_one_that_took_effect(
    lifecycle: TextLifecycle, controller: ServingController, tmp_path: Path
) -> None:
    lifecycle.publish(1)
    settle(lifecycle, controller)
    controller.pin(1).result(WAIT_SECONDS)
    lifecycle.publish(2)
    lifecycle.publish(3, text="nonsense")
    lifecycle.may_load.clear()
    lifecycle.is_loading.clear()
    superseded = controller.pin(2)
    assert lifecycle.is_loading.wait(WAIT_SECONDS)
    failing = controller.pin(3)
    lifecycle.may_load.set()

    with pytest.raises(LoadError):
        failing.result(WAIT_SECONDS)
    assert superseded.cancelled() or isinstance(superseded.exception(WAIT_SECONDS), CancelledError)
    assert controller.pinned_step == 1
    assert direct(lifecycle, tmp_path).pinned_step == 1


def test_a_pin_in_the_moment_of_a_promotion_by_the_policy_is_not_undone_by_it(
    lifecycle: TextLifecycle, controller: ServingController, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle.publish(1)
    settle(lifecycle, controller)
    lifecycle.publish(2)
    choose = controller._target.step

    def pinned_meanwhile() -> int | None:
        chosen = choose()
        controller.pin(1).result(WAIT_SECONDS)
        return chosen

    monkeypatch.setattr(controller._target, "step", pinned_meanwhile)
    settle(lifecycle, controller)
    assert serving(lifecycle) == 1
    assert lifecycle.promoted == [1]


def test_a_pin_is_not_superseded_by_the_policy_that_chooses_the_same_step_while_it_begins(
    lifecycle: TextLifecycle, controller: ServingController, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle.publish(1, 2)
    lifecycle.may_load.clear()
    choose, promote, has_chosen = controller._target.step, controller._promote, threading.Event()
    reconciling = threading.Thread(target=controller.reconcile)

    def chosen() -> int | None:
        step = choose()
        has_chosen.set()
        return step

    def followed_meanwhile(step: int, deadline: float | None) -> Future[Handle]:
        if not reconciling.is_alive():
            reconciling.start()
            assert has_chosen.wait(WAIT_SECONDS)
        return promote(step, deadline)

    monkeypatch.setattr(controller._target, "step", chosen)
    monkeypatch.setattr(controller, "_promote", followed_meanwhile)
    change = controller.pin(1)
    reconciling.join(WAIT_SECONDS)
    lifecycle.may_load.set()

    assert change.result(WAIT_SECONDS).serving_step == 1
