from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit.many_checkpoints import Reading, publish_many
from testkit.text_lifecycle import WAIT_SECONDS
from testkit.watcher_harness import WatcherHarness
from understudy.checkpoints.layout import step_name
from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.serving import checkpoint_watcher
from understudy.evaluator.types import EvaluationOutcome

SCORED, SKIPPED = EvaluationOutcome.SCORED, EvaluationOutcome.SKIPPED

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_what_is_committed_between_two_looks_is_seen_at_a_peek(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness()
    harness.lifecycle.publish(1)
    harness.watcher.start()
    assert harness.started_serving(1)
    os.utime(harness.lifecycle.run.checkpoints, ns=(1, 1))  # long ago, as clocks of file systems are coarse
    harness.lifecycle.write(2)
    assert harness.started_serving(2), "the next look is an hour away"


def test_everything_unsettled_is_held_and_given_out_in_step_order(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(3, 1, 2)
    harness.reconcile()

    assert harness.leased() == [1, 2, 3]
    assert [harness.evaluate_next(loss=1.0) for _ in range(3)] == [1, 2, 3]
    harness.reconcile()
    assert harness.entries() == [(1, SCORED), (2, SCORED), (3, SCORED)]


def test_what_is_settled_is_let_go_but_for_the_serving_version_its_predecessor_and_the_best(
    harness: WatcherHarness,
) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.8), (5, 0.9)):
        harness.lifecycle.publish(step)
        harness.reconcile()
        assert harness.evaluate_next(loss) == step
    harness.reconcile()

    assert harness.leased() == [2, 4, 5]
    harness.controller.pin(3).result(WAIT_SECONDS)
    harness.reconcile()
    assert harness.leased() == [2, 3, 5]


def test_a_run_folder_that_is_gone_for_a_while_settles_nothing(
    harness: WatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.lifecycle.publish(10, 20)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_watcher, "_PASS_SECONDS", -1.0)  # no time to lease any
        harness.reconcile()
    assert not (harness.lifecycle.run.leases / step_name(10)).exists()
    run = harness.lifecycle.run.checkpoints
    away = run.rename(run.with_name("away"))
    with pytest.raises(FileNotFoundError, match="is gone"):
        harness.look()
    away.rename(run)
    harness.reconcile()
    assert [harness.evaluate_next(loss=1.0) for _ in range(2)] == [10, 20]
    assert harness.entries() == [(10, SCORED), (20, SCORED)]


@pytest.mark.parametrize("away", ["checkpoints", "leases"])
def test_what_is_to_be_loaded_while_a_folder_is_gone_is_loaded_and_scored_later(
    harness: WatcherHarness, away: str
) -> None:
    lifecycle = harness.lifecycle
    lifecycle.publish(10, 20)
    folder: Path = getattr(lifecycle.run, away)
    kept = folder.rename(folder.with_name("away"))
    for _ in range(5):
        with contextlib.suppress(FileNotFoundError):
            harness.reconcile()
        assert "is gone; waiting for it to return" in lifecycle.status(20).error
        lifecycle.clock.now += 60
    kept.rename(folder)
    harness.reconcile()
    assert [harness.evaluate_next(loss=1.0) for _ in range(2)] == [10, 20]
    assert harness.entries() == [(10, SCORED), (20, SCORED)]


def test_nothing_is_decided_while_another_state_folder_is_where_the_evaluator_s_was(harness: WatcherHarness) -> None:
    state = harness.lifecycle.run.evaluator
    harness.lifecycle.publish(1)
    harness.reconcile()
    away = state.rename(state.with_name("away"))
    state.mkdir()
    harness.lifecycle.write(2)
    with pytest.raises(LedgerError, match="was deleted, moved or replaced"):
        harness.watcher._pass()
    assert harness.serving_step() == 1
    assert not harness.watcher.is_trained_anew
    assert not [*state.iterdir()]
    state.rmdir()
    away.rename(state)
    harness.reconcile()
    assert harness.serving_step() == 2


def test_another_training_where_the_run_was_begins_anew_once_it_has_a_checkpoint(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(1, 2)
    harness.reconcile()
    shutil.rmtree(harness.lifecycle.run.root)
    for _ in range(2):
        with pytest.raises(LedgerError, match="was deleted, moved or replaced"):
            harness.watcher._pass()
        assert not harness.watcher.is_trained_anew
    harness.lifecycle.write(1, "net 7")
    with pytest.raises(LedgerError, match="was deleted, moved or replaced"):
        harness.watcher._pass()
    assert harness.watcher.is_trained_anew
    assert harness.serving_step() == 2


def test_a_training_that_begins_again_below_the_steps_before_is_served_by_the_latest_policy(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness()
    harness.lifecycle.publish(1, 2, 9)
    harness.reconcile()
    assert harness.serving_step() == harness.controller.resolve("latest") == 9
    shutil.rmtree(harness.lifecycle.run.checkpoints)
    harness.lifecycle.write(1, "net 7")
    harness.reconcile()
    assert harness.serving_step() == harness.controller.resolve("latest") == 1
    harness.lifecycle.write(2, "net 8")
    harness.reconcile()
    assert harness.serving_step() == harness.controller.resolve("latest") == 2


def test_the_latest_policy_passes_over_what_waits_but_not_what_is_being_evaluated(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(policy="latest")
    harness.lifecycle.publish(1)
    harness.reconcile()
    being_evaluated = harness.backlog.next()
    harness.lifecycle.publish(2, 3)
    harness.reconcile()

    assert being_evaluated is not None
    assert harness.entries() == [(2, SKIPPED)]
    harness.score(being_evaluated, 1.0)
    harness.backlog.finished()
    assert harness.evaluate_next(loss=1.0) == 3


def test_the_latest_policy_passes_over_what_is_older_than_the_checkpoint_being_evaluated(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(policy="latest")
    harness.lifecycle.publish(5)
    harness.reconcile()
    being_evaluated = harness.backlog.next()
    harness.lifecycle.publish(3, 4)
    harness.reconcile()

    assert being_evaluated is not None
    assert being_evaluated.step == 5
    assert harness.entries() == [(3, SKIPPED), (4, SKIPPED)]
    assert len(harness.backlog) == 1


def test_the_latest_policy_holds_and_hashes_only_the_newest_that_is_whole(
    make_harness: Callable[..., WatcherHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(policy="latest")
    publish_many(harness, 100)
    (harness.lifecycle.run.checkpoint(99) / "model.keras").unlink()
    reading = Reading(monkeypatch)
    while not harness.watcher._is_done or harness.serving_step() != 98:
        harness.reconcile()
    assert harness.evaluate_next(loss=1.0) == 98
    assert harness.leased() == [98]
    assert reading.hashes < 5
    assert harness.entries() == [*((step, SKIPPED) for step in range(98)), (98, SCORED)]


def test_a_wake_starts_a_pass_at_once(harness: WatcherHarness) -> None:
    harness.watcher.start()
    harness.lifecycle.write(1)
    harness.watcher.wake()

    assert harness.evaluate_next(loss=1.0) == 1


def test_one_checkpoint_in_k_is_evaluated_and_the_others_are_recorded_with_the_reason(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(policy=3)
    harness.lifecycle.publish(10, 20, 30, 40)
    harness.reconcile()
    assert [harness.evaluate_next(loss=1.0) for _ in range(2)] == [10, 40]
    harness.reconcile()
    assert harness.entries() == [(20, SKIPPED), (30, SKIPPED), (10, SCORED), (40, SCORED)]
    assert harness.ledger.page()[0].reason == "the policy is to evaluate one checkpoint in 3"
    harness.close()

    again = make_harness(policy=3)
    again.lifecycle.publish(50, 60, 70)
    again.reconcile()
    assert again.evaluate_next(loss=1.0) == 70
    assert again.entries()[4:] == [(50, SKIPPED), (60, SKIPPED), (70, SCORED)]


def test_the_final_checkpoint_is_evaluated_whatever_its_place(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness(policy=3)
    harness.lifecycle.publish(10)
    harness.lifecycle.write(20, final=True)
    harness.lifecycle.publish()
    harness.reconcile()
    assert [harness.evaluate_next(loss=1.0) for _ in range(2)] == [10, 20]


def test_the_best_is_held_and_named_in_a_file_also_after_a_restart(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness()
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.8), (5, 0.9)):
        harness.lifecycle.publish(step)
        harness.reconcile()
        harness.evaluate_next(loss)
    harness.reconcile()
    best = json.loads((harness.lifecycle.run.evaluator / "best.json").read_text())
    assert best == {"step": 2, "value": 0.1, "dataset": "test", "metric": "loss", "mode": "min"}
    harness.close()

    again = make_harness()
    for step in (1, 2, 3, 4):
        shutil.rmtree(again.lifecycle.run.checkpoint(step))
    again.lifecycle.publish()
    again.reconcile()
    assert again.leased() == [2, 5]
    with again.lifecycle.acquire(2) as handle:
        assert handle.step == 2


def test_a_step_that_was_trained_anew_does_not_inherit_the_score_of_its_namesake(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(serve="best")
    for step, loss in ((1, 0.1), (2, 0.2)):
        harness.lifecycle.publish(step)
        harness.reconcile()
        harness.evaluate_next(loss)
    harness.reconcile()
    assert harness.serving_step() == 1
    for step in (1, 2):
        shutil.rmtree(harness.lifecycle.run.checkpoint(step))
    harness.lifecycle.publish(1, text="net 100")
    harness.reconcile()
    assert harness.ranking.best() == 2
    harness.evaluate_next(loss=0.3)
    harness.reconcile()

    assert harness.ranking.value(1) == 0.3
    assert harness.ranking.best() == 2


def test_a_pass_that_fails_after_many_that_left_a_checkpoint_out_is_tried_again_as_soon_as_a_first_one(
    harness: WatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, pauses = harness.watcher, list[float]()

    def fail_at_last() -> None:
        if len(pauses) == 20:
            raise OSError("the mount is lost")

    def pause(seconds: float, _seen: object) -> None:
        pauses.append(seconds)
        watcher._closing = len(pauses) > 20

    monkeypatch.setattr(harness.lifecycle.store, "_unread", "1.keras cannot be read: Permission denied")
    monkeypatch.setattr(watcher, "_poll_interval_seconds", 0.1)
    monkeypatch.setattr(watcher, "_pass", fail_at_last)
    monkeypatch.setattr(watcher, "_pause", pause)
    watcher._run()
    assert (watcher.failures, watcher.problem) == (21, "the mount is lost")
    assert pauses[-1] == pytest.approx(0.2)
