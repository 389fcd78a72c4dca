"""Each rollback goes further back: which version it serves, and what is kept for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit.text_lifecycle import WAIT_SECONDS
from testkit.watcher_harness import WatcherHarness
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    ConfigurationError,
    NoEarlierVersionError,
    StorageError,
)
from understudy.evaluator.serving.promotion import PinFile
from understudy.evaluator.serving.serving_history import HISTORY_FILE, ServingHistory

pytestmark = pytest.mark.usefixtures("logical_cpus")


def serve_in_turn(harness: WatcherHarness, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        harness.lifecycle.publish(step)
        harness.reconcile()
        assert harness.evaluate_next(loss) == step
    harness.reconcile()
    harness.watcher._publish_serving()


def roll_back(harness: WatcherHarness) -> int:
    return harness.controller.roll_back().result(WAIT_SECONDS).serving_step


def delete(harness: WatcherHarness, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(harness.lifecycle.run.checkpoint(step))
    harness.lifecycle.publish()
    harness.reconcile()


def test_each_rollback_goes_further_back_until_none_is_left(harness: WatcherHarness) -> None:
    serve_in_turn(harness, 1, 2, 3)

    assert [roll_back(harness), roll_back(harness)] == [2, 1]
    assert harness.controller.roll_back_step is None
    with pytest.raises(NoEarlierVersionError, match=r"served before step 1; pin one of the steps 2, 3$"):
        harness.controller.roll_back()
    assert (harness.serving_step(), harness.controller.pinned_step) == (1, 1)


def test_a_rollback_after_a_pin_returns_to_where_it_was(harness: WatcherHarness) -> None:
    serve_in_turn(harness, 1, 2, 3)
    harness.controller.pin(1).result(WAIT_SECONDS)

    assert [roll_back(harness), roll_back(harness)] == [3, 2]


def test_a_version_that_was_left_is_returned_to_once_it_served_again(harness: WatcherHarness) -> None:
    serve_in_turn(harness, 1, 2)
    assert roll_back(harness) == 1
    assert harness.controller.unpin().result(WAIT_SECONDS).serving_step == 2
    serve_in_turn(harness, 3)

    assert [roll_back(harness), roll_back(harness)] == [2, 1]


def test_rollbacks_go_further_back_over_a_restart_although_the_trainer_deleted_what_they_serve(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness()
    serve_in_turn(harness, 1, 2, 3)
    assert roll_back(harness) == 2
    harness.reconcile()
    delete(harness, 1)
    harness.close()

    again = make_harness()
    assert again.target.returnable_steps() == {1, 2}, "before they are found"
    again.lifecycle.may_load.clear()
    again.watcher._reconcile()
    assert again.watcher._is_done
    assert again.serving_step() is None
    again.lifecycle.may_load.set()
    again.reconcile()
    assert again.serving_step() == 2
    assert roll_back(again) == 1


def test_a_rollback_passes_over_what_is_gone_and_what_has_a_score_that_is_not_finite(harness: WatcherHarness) -> None:
    serve_in_turn(harness, 1, 2)
    serve_in_turn(harness, 3, loss=float("nan"))
    serve_in_turn(harness, 4, 5)
    assert harness.leased() == [1, 4, 5], "the best, and what a rollback serves"
    delete(harness, 2)
    assert roll_back(harness) == 4

    harness.reconcile()
    assert (harness.leased(), roll_back(harness)) == ([1, 4, 5], 1)


def test_a_rollback_that_is_superseded_leaves_nothing(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness()
    serve_in_turn(harness, 1, 2)
    harness.close()
    again = make_harness()
    again.reconcile()
    again.lifecycle.may_load.clear()
    superseded = again.controller.roll_back()
    pinned = again.controller.pin(2)
    again.lifecycle.may_load.set()
    assert pinned.result(WAIT_SECONDS).serving_step == 2
    with pytest.raises(CancelledError, match="superseded by another"):
        superseded.result(WAIT_SECONDS)

    again.controller.pin(1).result(WAIT_SECONDS)
    assert again.controller.roll_back_step == 2


def test_a_rollback_that_cannot_be_written_is_reported_and_not_pinned(harness: WatcherHarness) -> None:
    serve_in_turn(harness, 1, 2)
    state = harness.lifecycle.run.evaluator
    (state / HISTORY_FILE).unlink()
    (state / HISTORY_FILE).mkdir()

    with pytest.raises(StorageError, match=r"serving_history\.json, from which rollbacks know .*; check the disk's"):
        roll_back(harness)
    assert (harness.controller.pinned_step, PinFile(state).read()) == (None, None)


def test_without_a_version_before_the_error_names_the_newest_that_can_be_pinned(harness: WatcherHarness) -> None:
    with pytest.raises(NoEarlierVersionError, match=r"nothing is serving, .*; wait for another checkpoint"):
        harness.controller.roll_back()
    harness.lifecycle.publish(*range(1, 14))
    harness.reconcile()
    with pytest.raises(NoEarlierVersionError, match=r"before step 13; .* 3, 4, .* 12 \(the newest 10 of 12\)$"):
        harness.controller.roll_back()


def test_a_damaged_history_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).write_text('{"served": 3}')
    with pytest.raises(ConfigurationError, match=r"serving_history\.json is damaged .*; delete it to start"):
        ServingHistory(tmp_path)


def test_only_the_newest_32_versions_are_kept(tmp_path: Path) -> None:
    history = ServingHistory(tmp_path)
    for step in range(40):
        history.note(lambda step=step: (step, "digest"))  # type: ignore[misc]
    history.write()
    assert [step for step, _ in ServingHistory(tmp_path).newest_first()] == [*range(39, 7, -1)]
