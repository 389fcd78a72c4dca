from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from testkit.text_lifecycle import WAIT_SECONDS
from testkit.watcher_harness import WatcherHarness
from understudy.checkpoints import manifest
from understudy.evaluator.serving import checkpoint_watcher
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, VersionState

SCORED, SKIPPED, FAILED = EvaluationOutcome.SCORED, EvaluationOutcome.SKIPPED, EvaluationOutcome.FAILED
ACCEPTED, REFUSED = EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED

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


class Reading:
    """Counts what is read of checkpoints."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.manifests, self.hashes = 0, 0
        decode, describe = manifest.decode_manifest, manifest.describe_file

        def decoding(*args: Any, **options: Any) -> Any:
            self.manifests += 1
            return decode(*args, **options)

        def describing(*args: Any) -> Any:
            self.hashes += 1
            return describe(*args)

        patch.setattr(manifest, "decode_manifest", decoding)
        patch.setattr(manifest, "describe_file", describing)


def publish_many(harness: WatcherHarness, count: int) -> None:
    """Put as many checkpoints into the run folder: copies of one, under other steps."""
    harness.lifecycle.write(0)
    original = harness.lifecycle.run.checkpoint(0)
    whole = manifest.read_manifest(original)
    for step in range(1, count):
        folder = harness.lifecycle.run.checkpoint(step)
        folder.mkdir()
        (folder / "model.keras").hardlink_to(original / "model.keras")
        (folder / "manifest.json").write_bytes(manifest.encode_manifest(replace(whole, step=step)))


def test_of_thousands_of_checkpoints_few_are_read_before_the_newest_is_served(
    harness: WatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_many(harness, 2000)
    reading = Reading(monkeypatch)
    harness.reconcile()

    assert harness.serving_step() == 1999
    assert reading.hashes == 1
    assert reading.manifests < 30
    while not harness.watcher._is_done:
        harness.reconcile()
    assert harness.leased() == [*range(2000)]
    assert reading.hashes == 1
    assert reading.manifests < 3 * 2000
    assert harness.evaluate_next(loss=1.0) == 0

    before = reading.manifests
    harness.reconcile()
    harness.lifecycle.write(2000)
    harness.reconcile()
    assert harness.serving_step() == 2000
    assert reading.manifests - before < 5, "known manifests are not read again"
    assert harness.evaluate_next(loss=1.0) == 1


def test_the_first_load_runs_undisturbed_and_the_others_are_read_as_soon_as_it_ends(
    harness: WatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_watcher, "_FIRST_LOAD_SECONDS", 2 * WAIT_SECONDS)
    publish_many(harness, 700)
    reading = Reading(monkeypatch)
    harness.lifecycle.may_load.clear()
    harness.watcher.start()
    try:
        assert harness.lifecycle.is_loading.wait(WAIT_SECONDS)
        until = time.monotonic() + 0.3
        while time.monotonic() < until and reading.manifests < 30:
            time.sleep(0.01)
        assert reading.manifests < 30
        loaded_at = time.monotonic()
        harness.lifecycle.may_load.set()
        while len(harness.lifecycle.store.checkpoints()) < 700:
            assert time.monotonic() < loaded_at + WAIT_SECONDS
            time.sleep(0.01)
        assert harness.serving_step() == 699
    finally:
        harness.lifecycle.may_load.set()
        harness.watcher.close(WAIT_SECONDS)


def test_restarted_over_thousands_of_checkpoints_it_goes_on_where_it_was(
    make_harness: Callable[..., WatcherHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    publish_many(harness, 700)
    while not (harness.watcher._is_done and harness.serving_step() == 699):
        harness.reconcile()
    assert [harness.evaluate_next(loss=1.0 + step) for step in range(3)] == [0, 1, 2]
    harness.close()

    again = make_harness()
    for step in range(300, 690):
        shutil.rmtree(again.lifecycle.run.checkpoint(step))
    reading = Reading(monkeypatch)
    again.reconcile()
    assert again.serving_step() == 699
    assert reading.manifests < 40
    while not again.watcher._is_done:
        again.reconcile()
    assert again.leased() == [0, *range(3, 700)], "what is unsettled, and the best"
    assert [again.evaluate_next(loss=1.0) for _ in range(10)] == [*range(3, 13)]


def test_the_next_newest_is_served_where_the_newest_are_damaged(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(*range(1, 51))
    for step in range(20, 51):
        (harness.lifecycle.run.checkpoint(step) / "model.keras").write_text("torn!")
    for _ in range(40):
        harness.reconcile()
    assert harness.serving_step() == 19


@pytest.mark.parametrize("wanted", ["pinned", "best", "configured"])
def test_an_old_step_that_should_be_serving_is_found_first(
    make_harness: Callable[..., WatcherHarness], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    harness = make_harness()
    publish_many(harness, 600)
    while not (harness.watcher._is_done and harness.serving_step() == 599):
        harness.reconcile()
    for step in range(6):
        assert harness.evaluate_next(loss=0.1 if step == 5 else 1.0) == step
    if wanted == "pinned":
        harness.controller.pin(5).result(WAIT_SECONDS)
    harness.close()

    serve: dict[str, Any] = {"pinned": {}, "best": {"serve": "best"}, "configured": {"serve": 5}}
    again = make_harness(**serve[wanted])
    reading = Reading(monkeypatch)
    again.reconcile()
    assert again.serving_step() == 5
    assert reading.manifests < 40


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
    assert harness.watcher._pause_seconds(failures=0) == 1.0
    shutil.rmtree(harness.lifecycle.run.checkpoint(1))
    harness.lifecycle.clock.now += 2
    harness.reconcile()

    assert harness.entries() == [(1, FAILED)]
    harness.lifecycle.clock.now += 60
    harness.reconcile()
    assert harness.watcher._pause_seconds(failures=0) == 3600, "the poll interval"


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


def test_a_poke_makes_it_look_at_once(harness: WatcherHarness) -> None:
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


def test_a_gate_lets_nothing_serving_before_its_score_has_passed(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness(min_value=0.5)
    harness.lifecycle.publish(1)
    harness.reconcile()
    assert harness.serving_step() is None
    harness.evaluate_next(loss=0.6)
    harness.reconcile()
    assert harness.serving_step() is None
    harness.lifecycle.publish(2)
    harness.reconcile()
    harness.evaluate_next(loss=0.5)
    harness.reconcile()

    assert harness.serving_step() == 2
    assert harness.entries() == [(1, SCORED), (1, REFUSED), (2, SCORED), (2, ACCEPTED)]
    refused, accepted = harness.ledger.page()[1::2]
    assert refused.reason == "loss is 0.6; at most 0.5 is required"
    assert refused.metrics == {"value": 0.6, "min_value": 0.5}
    assert accepted.reason == "loss is 0.5"


def test_a_refused_checkpoint_is_recorded_with_the_numbers_compared(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(min_improvement=0.125)
    for step, loss in ((1, 1.0), (2, 0.9375), (3, 0.875), (4, float("nan"))):
        harness.lifecycle.publish(step)
        harness.reconcile()
        harness.evaluate_next(loss)
        harness.reconcile()

    assert harness.serving_step() == 3
    decisions = [record for record in harness.ledger.page() if record.outcome is not SCORED]
    assert [(record.step, record.outcome) for record in decisions] == [
        (1, ACCEPTED),
        (2, REFUSED),
        (3, ACCEPTED),
        (4, REFUSED),
    ]
    assert decisions[1].metrics == {
        "value": 0.9375,
        "serving_value": 1.0,
        "improvement": 0.0625,
        "min_improvement": 0.125,
    }
    assert "0.0625 better than the 1.0 of the serving step 1; 0.125 is required" in decisions[1].reason
    assert decisions[3].reason == "loss is nan, the loss nan; finite numbers are required"


def test_after_a_restart_what_was_admitted_is_served_and_what_was_not_decided_is(
    make_harness: Callable[..., WatcherHarness],
) -> None:
    harness = make_harness(min_improvement=0.25)
    harness.lifecycle.publish(1, 2)
    harness.reconcile()
    harness.evaluate_next(loss=1.0)
    harness.reconcile()
    harness.evaluate_next(loss=0.9)  # the process ends before the gate has decided on it
    harness.close()

    again = make_harness(min_improvement=0.25)
    again.lifecycle.publish()
    again.reconcile()
    again.reconcile()
    assert again.serving_step() == 1
    assert again.entries() == [(1, SCORED), (1, ACCEPTED), (2, SCORED), (2, REFUSED)]


def test_a_pin_goes_before_the_gate(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness(min_value=0.5)
    harness.lifecycle.publish(1)
    harness.reconcile()
    harness.evaluate_next(loss=0.6)
    harness.controller.pin(1).result(WAIT_SECONDS)
    harness.reconcile()
    assert harness.serving_step() == 1


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
