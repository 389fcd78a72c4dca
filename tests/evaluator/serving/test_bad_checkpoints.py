"""The watcher over checkpoints that are damaged, deleted, without room, or scored with no number."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable

import pytest

from testkit.many_checkpoints import publish_many
from testkit.watcher_harness import WatcherHarness
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, VersionState

SCORED, FAILED = EvaluationOutcome.SCORED, EvaluationOutcome.FAILED

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_the_next_newest_is_served_where_the_newest_are_damaged(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(*range(1, 51))
    for step in range(20, 51):
        (harness.lifecycle.run.checkpoint(step) / "model.keras").write_text("torn!")
    for _ in range(40):
        harness.reconcile()
    assert harness.serving_step() == 19


def test_a_checkpoint_that_is_deleted_before_its_manifest_is_read_is_recorded(harness: WatcherHarness) -> None:
    publish_many(harness, 100)
    harness.reconcile()
    shutil.rmtree(harness.lifecycle.run.checkpoint(7))
    while not harness.watcher._is_done:
        harness.reconcile()
    assert harness.entries() == [(7, FAILED)]
    assert "deleted before it could be" in harness.ledger.page()[0].reason


def test_a_damaged_checkpoint_is_tried_again_later_and_then_given_up(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(1)
    harness.reconcile()
    harness.evaluate_next(loss=1.0)
    harness.lifecycle.publish(2)
    file = harness.lifecycle.run.checkpoint(2) / "model.keras"
    file.write_text("torn ")
    for pause in (0, 0, 1.0, 2.0, 0):
        harness.lifecycle.clock.now += pause
        harness.reconcile()

    assert harness.entries() == [(1, SCORED), (2, FAILED)]
    assert harness.lifecycle.observer.outcomes == ["loaded", "failed", "failed", "failed"]
    assert "SHA-256" in harness.ledger.page()[1].reason
    assert harness.lifecycle.status(2).state is VersionState.END


def test_a_checkpoint_that_mends_while_in_quarantine_is_evaluated(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(1)
    file = harness.lifecycle.run.checkpoint(1) / "model.keras"
    content = file.read_text()
    file.write_text("torn ")
    harness.reconcile()
    file.write_text(content)
    harness.lifecycle.clock.now += 1
    harness.reconcile()

    assert harness.evaluate_next(loss=1.0) == 1
    assert harness.entries() == [(1, SCORED)]


def test_a_checkpoint_that_goes_while_in_quarantine_is_recorded_with_both_reasons(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(1)
    (harness.lifecycle.run.checkpoint(1) / "model.keras").write_text("too short")
    harness.reconcile()
    shutil.rmtree(harness.lifecycle.run.checkpoint(1))
    harness.reconcile()

    assert harness.entries() == [(1, FAILED)]
    reason = harness.ledger.page()[0].reason
    assert "was deleted before it could be evaluated; before that: " in reason


def test_a_retry_that_nothing_needs_any_more_does_not_keep_it_looking(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(1, 2)
    (harness.lifecycle.run.checkpoint(1) / "model.keras").write_text("too short")
    harness.reconcile()
    harness.reconcile()
    assert harness.watcher._pause_seconds() == 1.0
    shutil.rmtree(harness.lifecycle.run.checkpoint(1))
    harness.lifecycle.clock.now += 2
    harness.reconcile()

    assert harness.entries() == [(1, FAILED)]
    harness.lifecycle.clock.now += 60
    harness.reconcile()
    assert harness.watcher._pause_seconds() == 3600, "the poll interval"


def test_a_damaged_checkpoint_that_is_held_is_given_up_with_the_reason_also_after_its_deletion(
    harness: WatcherHarness,
) -> None:
    harness.lifecycle.publish(1)
    (harness.lifecycle.run.checkpoint(1) / "model.keras").write_text("torn ")
    harness.reconcile()
    shutil.rmtree(harness.lifecycle.run.checkpoint(1))
    for pause in (1.0, 2.0, 0):
        harness.lifecycle.clock.now += pause
        harness.reconcile()

    assert harness.entries() == [(1, FAILED)]
    assert "SHA-256" in harness.ledger.page()[0].reason


def test_without_a_dataset_a_bad_checkpoint_is_recorded_all_the_same(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(datasets=())
    harness.lifecycle.publish(1)
    harness.reconcile()
    harness.lifecycle.publish(2, text="nonsense")
    for pause in (0.0, 1.0, 2.0, 0.0):
        harness.lifecycle.clock.now += pause
        harness.reconcile()

    assert harness.entries() == [(2, FAILED)]
    assert harness.leased() == [1]


def test_a_full_disk_is_not_held_against_the_checkpoint(
    harness: WatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.lifecycle.publish(1)

    def full(info: CheckpointInfo) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(info.step))

    with monkeypatch.context() as patch:
        patch.setattr(harness.lifecycle.store, "lease", full)
        for _ in range(5):
            harness.reconcile()
            harness.lifecycle.clock.now += 60

    assert harness.lifecycle.observer.outcomes == ["postponed"] * 5
    assert "No space left" in harness.lifecycle.status(1).error
    assert harness.entries() == []
    harness.reconcile()
    assert harness.evaluate_next(loss=1.0) == 1


def test_a_checkpoint_whose_score_is_no_number_is_taken_out_of_serving_and_never_best(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(1)
    harness.reconcile()
    harness.evaluate_next(loss=0.5)
    harness.lifecycle.publish(2)
    harness.reconcile()
    assert harness.serving_step() == 2
    harness.evaluate_next(loss=float("nan"))
    harness.reconcile()

    assert harness.entries() == [(1, SCORED), (2, SCORED)]
    assert harness.serving_step() == 1
    assert harness.ranking.best() == 1
    harness.lifecycle.publish(3)
    harness.reconcile()
    assert harness.serving_step() == 3
