"""The watcher over thousands of checkpoints: which it reads first, and what it does meanwhile."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

from testkit.many_checkpoints import Reading, publish_many
from testkit.text_lifecycle import WAIT_SECONDS
from testkit.watcher_harness import WatcherHarness
from understudy.evaluator.serving import checkpoint_watcher

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_of_thousands_of_checkpoints_few_are_read_before_the_newest_is_served(
    harness: WatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_many(harness, 1200)
    reading = Reading(monkeypatch)
    harness.reconcile()

    assert harness.serving_step() == 1199
    assert reading.hashes == 1
    assert reading.manifests < 30
    while not harness.watcher._is_done:
        harness.reconcile()
    assert harness.leased() == [*range(1200)]
    assert reading.hashes == 1
    assert reading.manifests < 3 * 1200
    assert harness.evaluate_next(loss=1.0) == 0

    before = reading.manifests
    harness.reconcile()
    harness.lifecycle.write(1200)
    harness.reconcile()
    assert harness.serving_step() == 1200
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
