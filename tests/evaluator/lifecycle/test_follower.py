from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper_theatre import WAIT_SECONDS, PaperTheatre

from understudy.checkpoints import manifest, source
from understudy.evaluator.datasets import ArrayDataset, EvaluationDataset
from understudy.evaluator.lifecycle.backlog import Backlog
from understudy.evaluator.lifecycle.best_file import BestFile
from understudy.evaluator.lifecycle.director import StageDirector
from understudy.evaluator.lifecycle.follower import Follower
from understudy.evaluator.lifecycle.gate import Gatekeeper, build_gate
from understudy.evaluator.lifecycle.pin import PinFile
from understudy.evaluator.lifecycle.promotion import Ranking, parse_monitor
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.results import ResultFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.settings import EvaluationPolicy, ServingPolicy
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, EvaluationResult, VersionState

SCORED, SKIPPED, FAILED = EvaluationOutcome.SCORED, EvaluationOutcome.SKIPPED, EvaluationOutcome.FAILED
ACCEPTED, REFUSED = EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED

DATASET = ArrayDataset("test", {"x": np.zeros((1, 1), np.float32), "y": np.zeros(1, np.float32)})


class Stage:
    """A follower over a paper theatre, which looks when it is told to; the test plays the examiner."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: EvaluationPolicy | int = "every",
        datasets: tuple[EvaluationDataset, ...] = (DATASET,),
        serve: ServingPolicy | int = "latest",
        **gate: float,
    ) -> None:
        self.theatre = theatre = PaperTheatre(folder)
        state = theatre.run.evaluator
        self.ledger = Ledger(state / "ledger.sqlite")
        self.monitor = parse_monitor(None, None, [dataset.name for dataset in datasets])
        self.ranking = Ranking(self.monitor)
        self.ranking.observe(self.ledger.scored(DATASET.name))
        self.recorder = Recorder(
            ledger=self.ledger,
            results=ResultFiles(state / "results"),
            summaries=Summaries(state / "tensorboard"),
            datasets=datasets,
            observer=SilentObserver(),
            listener=lambda record: self.ranking.observe([record]),
        )
        self.backlog = Backlog(policy)
        self.director = StageDirector(
            policy=serve,
            shelf=theatre.shelf,
            quarantine=theatre.quarantine,
            ranking=self.ranking,
            gatekeeper=self.gatekeeper(gate, datasets),
            manager=theatre.manager,
            pin_file=PinFile(state),
            on_settled=lambda: None,
        )
        self.follower = Follower(
            shelf=theatre.shelf,
            manager=theatre.manager,
            history=theatre.history,
            quarantine=theatre.quarantine,
            recorder=self.recorder,
            ranking=self.ranking,
            director=self.director,
            backlog=self.backlog,
            best_file=BestFile(state, self.monitor),
            policy=policy,
            poll_interval_seconds=3600,
        )
        theatre.manager.start()

    def gatekeeper(self, gate: Mapping[str, float], datasets: tuple[EvaluationDataset, ...]) -> Gatekeeper | None:
        values = {"min_value": None, "min_improvement": None, **gate}
        built = build_gate(self.monitor, **values)
        if built is None:
            return None
        return Gatekeeper(built, dataset=datasets[0], ranking=self.ranking, ledger=self.ledger, recorder=self.recorder)

    def look(self) -> None:
        """Look once, and wait for what that put under way."""
        self.follower._look()
        promoting = self.director._under_way
        if promoting is not None:
            promoting.exception(WAIT_SECONDS)

    def evaluate_next(self, loss: float) -> int:
        """Score what the backlog gives out."""
        info = self.backlog.next()
        assert info is not None
        self.score(info, loss)
        self.backlog.finished()
        return info.step

    def score(self, info: CheckpointInfo, loss: float) -> None:
        result = EvaluationResult(
            metrics={"loss": loss}, examples=1, batches=1, step=info.step, waiting_seconds=0, computing_seconds=0
        )
        self.recorder.record_score(info.digest, DATASET, result, duration_seconds=0)

    def on_stage(self) -> int | None:
        stage = self.theatre.manager.stage
        return None if stage is None else stage.step

    def came_on_stage(self, step: int) -> bool:
        return any(stop.wait(0.01) or self.on_stage() == step for stop in [threading.Event()] * int(WAIT_SECONDS * 100))

    def held(self) -> list[int]:
        return sorted(int(folder.name) for folder in self.theatre.run.pinned.iterdir())

    def entries(self) -> list[tuple[int, EvaluationOutcome]]:
        return [(record.step, record.outcome) for record in self.ledger.page()]

    def close(self) -> None:
        self.follower.close(WAIT_SECONDS)
        self.theatre.may_load.set()
        self.theatre.manager.close(WAIT_SECONDS)
        self.recorder.close()
        self.ledger.close()


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**options: object) -> Stage:
        stages.append(Stage(tmp_path, **options))  # type: ignore[arg-type] # passed through
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage()


pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_what_is_committed_between_two_looks_is_seen_at_a_glance(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    stage.theatre.publish(1)
    stage.follower.start()
    assert stage.came_on_stage(1)
    os.utime(stage.theatre.run.checkpoints, ns=(1, 1))  # long ago, as clocks of file systems are coarse
    stage.theatre.write(2)
    assert stage.came_on_stage(2), "the next look is an hour away"


def test_everything_unsettled_is_held_and_given_out_in_step_order(stage: Stage) -> None:
    stage.theatre.publish(3, 1, 2)
    stage.look()

    assert stage.held() == [1, 2, 3]
    assert [stage.evaluate_next(loss=1.0) for _ in range(3)] == [1, 2, 3]
    stage.look()
    assert stage.entries() == [(1, SCORED), (2, SCORED), (3, SCORED)]


def test_what_is_settled_is_let_go_but_for_the_stage_its_predecessor_and_the_best(stage: Stage) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.8), (5, 0.9)):
        stage.theatre.publish(step)
        stage.look()
        assert stage.evaluate_next(loss) == step
    stage.look()

    assert stage.held() == [2, 4, 5]
    stage.director.pin(3).result(WAIT_SECONDS)
    stage.look()
    assert stage.held() == [2, 3, 5]


def test_the_latest_policy_passes_over_what_waits_but_not_what_is_being_evaluated(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(policy="latest")
    stage.theatre.publish(1)
    stage.look()
    being_evaluated = stage.backlog.next()
    stage.theatre.publish(2, 3)
    stage.look()

    assert being_evaluated is not None
    assert stage.entries() == [(2, SKIPPED)]
    stage.score(being_evaluated, 1.0)
    stage.backlog.finished()
    assert stage.evaluate_next(loss=1.0) == 3


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
        patch.setattr(source, "decode_manifest", decoding)
        patch.setattr(manifest, "describe_file", describing)


def publish_many(stage: Stage, count: int) -> None:
    """Put as many checkpoints into the run folder: copies of one, under other steps."""
    stage.theatre.write(0)
    original = stage.theatre.run.checkpoint(0)
    whole = manifest.read_manifest(original)
    for step in range(1, count):
        folder = stage.theatre.run.checkpoint(step)
        folder.mkdir()
        (folder / "model.keras").hardlink_to(original / "model.keras")
        (folder / "manifest.json").write_bytes(manifest.encode_manifest(replace(whole, step=step)))


def test_of_thousands_of_checkpoints_few_are_read_before_the_newest_is_served(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_many(stage, 2000)
    reading = Reading(monkeypatch)
    stage.look()

    assert stage.on_stage() == 1999
    assert reading.hashes == 1
    assert reading.manifests < 30
    while not stage.follower._is_done:
        stage.look()
    assert stage.held() == [*range(2000)]
    assert reading.hashes == 1
    assert reading.manifests < 3 * 2000
    assert stage.evaluate_next(loss=1.0) == 0

    before = reading.manifests
    stage.look()
    stage.theatre.write(2000)
    stage.look()
    assert stage.on_stage() == 2000
    assert reading.manifests - before < 5, "known manifests are not read again"
    assert stage.evaluate_next(loss=1.0) == 1


def test_restarted_over_thousands_of_checkpoints_it_goes_on_where_it_was(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage()
    publish_many(stage, 700)
    while not (stage.follower._is_done and stage.on_stage() == 699):
        stage.look()
    assert [stage.evaluate_next(loss=1.0 + step) for step in range(3)] == [0, 1, 2]
    stage.close()

    again = make_stage()
    for step in range(300, 690):
        shutil.rmtree(again.theatre.run.checkpoint(step))
    reading = Reading(monkeypatch)
    again.look()
    assert again.on_stage() == 699
    assert reading.manifests < 40
    while not again.follower._is_done:
        again.look()
    assert again.held() == [0, *range(3, 700)], "what is unsettled, and the best"
    assert [again.evaluate_next(loss=1.0) for _ in range(10)] == [*range(3, 13)]


def test_the_next_newest_is_served_where_the_newest_are_damaged(stage: Stage) -> None:
    stage.theatre.publish(*range(1, 51))
    for step in range(20, 51):
        (stage.theatre.run.checkpoint(step) / "model.keras").write_text("torn!")
    for _ in range(40):
        stage.look()
    assert stage.on_stage() == 19


@pytest.mark.parametrize("wanted", ["pinned", "best", "configured"])
def test_an_old_step_that_belongs_on_stage_is_found_first(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    stage = make_stage()
    publish_many(stage, 600)
    while not (stage.follower._is_done and stage.on_stage() == 599):
        stage.look()
    for step in range(6):
        assert stage.evaluate_next(loss=0.1 if step == 5 else 1.0) == step
    if wanted == "pinned":
        stage.director.pin(5).result(WAIT_SECONDS)
    stage.close()

    serve: dict[str, Any] = {"pinned": {}, "best": {"serve": "best"}, "configured": {"serve": 5}}
    again = make_stage(**serve[wanted])
    reading = Reading(monkeypatch)
    again.look()
    assert again.on_stage() == 5
    assert reading.manifests < 40


def test_the_latest_policy_holds_and_hashes_only_the_newest_that_is_whole(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(policy="latest")
    publish_many(stage, 100)
    (stage.theatre.run.checkpoint(99) / "model.keras").unlink()
    reading = Reading(monkeypatch)
    while not stage.follower._is_done or stage.on_stage() != 98:
        stage.look()
    assert stage.evaluate_next(loss=1.0) == 98
    assert stage.held() == [98]
    assert reading.hashes < 5
    assert stage.entries() == [*((step, SKIPPED) for step in range(98)), (98, SCORED)]


def test_a_checkpoint_that_is_deleted_before_its_manifest_is_read_is_recorded(stage: Stage) -> None:
    publish_many(stage, 100)
    stage.look()
    shutil.rmtree(stage.theatre.run.checkpoint(7))
    while not stage.follower._is_done:
        stage.look()
    assert stage.entries() == [(7, FAILED)]
    assert "deleted before it could be" in stage.ledger.page()[0].reason


def test_a_damaged_checkpoint_is_tried_again_later_and_then_given_up(stage: Stage) -> None:
    stage.theatre.publish(1)
    stage.look()
    stage.evaluate_next(loss=1.0)
    stage.theatre.publish(2)
    file = stage.theatre.run.checkpoint(2) / "model.keras"
    file.write_text("torn ")
    for pause in (0, 0, 1.0, 2.0, 0):
        stage.theatre.clock.now += pause
        stage.look()

    assert stage.entries() == [(1, SCORED), (2, FAILED)]
    assert stage.theatre.observer.outcomes == ["loaded", "failed", "failed", "failed"]
    assert "SHA-256" in stage.ledger.page()[1].reason
    assert stage.theatre.status(2).state is VersionState.END


def test_a_checkpoint_that_mends_while_in_quarantine_is_evaluated(stage: Stage) -> None:
    stage.theatre.publish(1)
    file = stage.theatre.run.checkpoint(1) / "model.keras"
    content = file.read_text()
    file.write_text("torn ")
    stage.look()
    file.write_text(content)
    stage.theatre.clock.now += 1
    stage.look()

    assert stage.evaluate_next(loss=1.0) == 1
    assert stage.entries() == [(1, SCORED)]


def test_a_checkpoint_that_goes_while_in_quarantine_is_recorded_with_both_reasons(stage: Stage) -> None:
    stage.theatre.publish(1)
    (stage.theatre.run.checkpoint(1) / "model.keras").write_text("too short")
    stage.look()
    shutil.rmtree(stage.theatre.run.checkpoint(1))
    stage.look()

    assert stage.entries() == [(1, FAILED)]
    reason = stage.ledger.page()[0].reason
    assert "was deleted before it could be evaluated; before that: " in reason


def test_a_damaged_checkpoint_that_is_held_is_given_up_with_the_reason_also_after_its_deletion(stage: Stage) -> None:
    stage.theatre.publish(1)
    (stage.theatre.run.checkpoint(1) / "model.keras").write_text("torn ")
    stage.look()
    shutil.rmtree(stage.theatre.run.checkpoint(1))
    for pause in (1.0, 2.0, 0):
        stage.theatre.clock.now += pause
        stage.look()

    assert stage.entries() == [(1, FAILED)]
    assert "SHA-256" in stage.ledger.page()[0].reason


def test_without_a_dataset_a_bad_checkpoint_is_recorded_all_the_same(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(datasets=())
    stage.theatre.publish(1)
    stage.look()
    stage.theatre.publish(2, text="othernet 2")
    stage.look()
    stage.look()

    assert stage.entries() == [(2, FAILED)]
    assert stage.held() == [1]


def test_a_full_disk_is_not_held_against_the_checkpoint(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.theatre.publish(1)

    def full(info: CheckpointInfo) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(info.step))

    with monkeypatch.context() as patch:
        patch.setattr(stage.theatre.shelf, "hold", full)
        for _ in range(5):
            stage.look()
            stage.theatre.clock.now += 60

    assert stage.theatre.observer.outcomes == ["postponed"] * 5
    assert "No space left" in stage.theatre.status(1).error
    assert stage.entries() == []
    stage.look()
    assert stage.evaluate_next(loss=1.0) == 1


def test_a_poke_makes_it_look_at_once(stage: Stage) -> None:
    stage.follower.start()
    stage.theatre.write(1)
    stage.follower.poke()

    assert stage.evaluate_next(loss=1.0) == 1


def test_one_checkpoint_in_k_is_evaluated_and_the_others_are_recorded_with_the_reason(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(policy=3)
    stage.theatre.publish(10, 20, 30, 40)
    stage.look()
    assert [stage.evaluate_next(loss=1.0) for _ in range(2)] == [10, 40]
    stage.look()
    assert stage.entries() == [(20, SKIPPED), (30, SKIPPED), (10, SCORED), (40, SCORED)]
    assert stage.ledger.page()[0].reason == "the policy is to evaluate one checkpoint in 3"
    stage.close()

    again = make_stage(policy=3)
    again.theatre.publish(50, 60, 70)
    again.look()
    assert again.evaluate_next(loss=1.0) == 70
    assert again.entries()[4:] == [(50, SKIPPED), (60, SKIPPED), (70, SCORED)]


def test_the_final_checkpoint_is_evaluated_whatever_its_place(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(policy=3)
    stage.theatre.publish(10)
    stage.theatre.write(20, final=True)
    stage.theatre.publish()
    stage.look()
    assert [stage.evaluate_next(loss=1.0) for _ in range(2)] == [10, 20]


def test_a_checkpoint_whose_score_is_no_number_is_taken_off_the_stage_and_never_best(stage: Stage) -> None:
    stage.theatre.publish(1)
    stage.look()
    stage.evaluate_next(loss=0.5)
    stage.theatre.publish(2)
    stage.look()
    assert stage.on_stage() == 2
    stage.evaluate_next(loss=float("nan"))
    stage.look()

    assert stage.entries() == [(1, SCORED), (2, SCORED)]
    assert stage.on_stage() == 1
    assert stage.ranking.best() == 1
    stage.theatre.publish(3)
    stage.look()
    assert stage.on_stage() == 3


def test_a_gate_lets_nothing_on_stage_before_its_score_has_passed(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(min_value=0.5)
    stage.theatre.publish(1)
    stage.look()
    assert stage.on_stage() is None
    stage.evaluate_next(loss=0.6)
    stage.look()
    assert stage.on_stage() is None
    stage.theatre.publish(2)
    stage.look()
    stage.evaluate_next(loss=0.5)
    stage.look()

    assert stage.on_stage() == 2
    assert stage.entries() == [(1, SCORED), (1, REFUSED), (2, SCORED), (2, ACCEPTED)]
    refused, accepted = stage.ledger.page()[1::2]
    assert refused.reason == "loss is 0.6; at most 0.5 is asked for"
    assert refused.metrics == {"value": 0.6, "min_value": 0.5}
    assert accepted.reason == "loss is 0.5"


def test_a_refused_checkpoint_is_recorded_with_the_numbers_compared(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(min_improvement=0.125)
    for step, loss in ((1, 1.0), (2, 0.9375), (3, 0.875), (4, float("nan"))):
        stage.theatre.publish(step)
        stage.look()
        stage.evaluate_next(loss)
        stage.look()

    assert stage.on_stage() == 3
    decisions = [record for record in stage.ledger.page() if record.outcome is not SCORED]
    assert [(record.step, record.outcome) for record in decisions] == [
        (1, ACCEPTED),
        (2, REFUSED),
        (3, ACCEPTED),
        (4, REFUSED),
    ]
    assert decisions[1].metrics == {
        "value": 0.9375,
        "stage_value": 1.0,
        "improvement": 0.0625,
        "min_improvement": 0.125,
    }
    assert "0.0625 better than the 1.0 of step 1 on stage; 0.125 is asked for" in decisions[1].reason
    assert decisions[3].reason == "loss is nan, the loss nan; numbers are asked for"


def test_after_a_restart_what_was_admitted_is_served_and_what_was_not_decided_is(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(min_improvement=0.25)
    stage.theatre.publish(1, 2)
    stage.look()
    stage.evaluate_next(loss=1.0)
    stage.look()
    stage.evaluate_next(loss=0.9)  # the process ends before the gate has decided on it
    stage.close()

    again = make_stage(min_improvement=0.25)
    again.theatre.publish()
    again.look()
    again.look()
    assert again.on_stage() == 1
    assert again.entries() == [(1, SCORED), (1, ACCEPTED), (2, SCORED), (2, REFUSED)]


def test_a_pin_goes_before_the_gate(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(min_value=0.5)
    stage.theatre.publish(1)
    stage.look()
    stage.evaluate_next(loss=0.6)
    stage.director.pin(1).result(WAIT_SECONDS)
    stage.look()
    assert stage.on_stage() == 1


def test_the_best_is_held_and_named_in_a_file_also_after_a_restart(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.8), (5, 0.9)):
        stage.theatre.publish(step)
        stage.look()
        stage.evaluate_next(loss)
    stage.look()
    best = json.loads((stage.theatre.run.evaluator / "best.json").read_text())
    assert best == {"step": 2, "value": 0.1, "dataset": "test", "metric": "loss", "mode": "min"}
    stage.close()

    again = make_stage()
    for step in (1, 2, 3, 4):
        shutil.rmtree(again.theatre.run.checkpoint(step))
    again.theatre.publish()
    again.look()
    assert again.held() == [2, 5]
    with again.theatre.acquire(2) as handle:
        assert handle.step == 2


def test_a_step_that_was_trained_anew_does_not_inherit_the_score_of_its_namesake(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(serve="best")
    for step, loss in ((1, 0.1), (2, 0.2)):
        stage.theatre.publish(step)
        stage.look()
        stage.evaluate_next(loss)
    stage.look()
    assert stage.on_stage() == 1
    for step in (1, 2):
        shutil.rmtree(stage.theatre.run.checkpoint(step))
    stage.theatre.publish(1, text="net 100")
    stage.look()
    assert stage.ranking.best() == 2
    stage.evaluate_next(loss=0.3)
    stage.look()

    assert stage.ranking.value(1) == 0.3
    assert stage.ranking.best() == 2
