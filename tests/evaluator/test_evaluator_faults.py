from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

from testkit.real_run import (
    FEATURES,
    WAIT_SECONDS,
    RealRun,
    dataset,
    outcomes,
    predicted_step,
    step_model,
    until_served,
    wait_for_records,
)
from understudy.checkpoints import FolderSource, RunDir, RunSource, Signature
from understudy.checkpoints.manifest import read_manifest
from understudy.checkpoints.source import Changes, CheckpointSource
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import Batch, EvaluationOutcome, EvaluationRecord

SCORED = EvaluationOutcome.SCORED
FAILED = EvaluationOutcome.FAILED

Damage = Callable[[Path], None]

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return RealRun(tmp_path)


def truncate(checkpoint: Path) -> None:
    file = checkpoint / "model.keras"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / "model.keras"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove_the_model(checkpoint: Path) -> None:
    (checkpoint / "model.keras").unlink()


def tear_the_manifest(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    file.write_bytes(file.read_bytes()[:-20])


def write_nonsense(folder: Path) -> None:
    (folder / "model.keras").write_bytes(b"no model")


def publish_damaged(run: RealRun, step: int, damage: Damage) -> None:
    """Publish a checkpoint elsewhere, damage it, and move it in as a whole."""
    elsewhere = RealRun(run.dir.root.with_name("elsewhere"))
    elsewhere.publish(step)
    damage(elsewhere.dir.checkpoint(step))
    elsewhere.dir.checkpoint(step).rename(run.dir.checkpoint(step))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "bytes, its manifest says"),
        (flip_a_bit, "SHA-256"),
        (remove_the_model, "is missing, its manifest lists it"),
        (tear_the_manifest, "is not a manifest"),
    ],
)
def test_a_damaged_checkpoint_is_quarantined_with_its_reason(run: RealRun, damage: Damage, reason: str) -> None:
    run.publish(1)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 1)
        publish_damaged(run, 2, damage)
        records = wait_for_records(evaluator, 2)

        assert outcomes(records) == [(1, "test", SCORED), (2, "", FAILED)]
        assert reason in records[1].reason
        assert predicted_step(evaluator) == 1
        assert reason in next(status.error for status in evaluator.status() if status.step == 2)
        assert run.told.loads == ["loaded", "failed", "failed", "failed"]

        run.publish(3)
        assert outcomes(wait_for_records(evaluator, 3))[2:] == [(3, "test", SCORED)]
        assert predicted_step(evaluator) == 3


def test_a_file_that_is_whole_but_no_model_is_quarantined(run: RealRun) -> None:
    run.publish(1)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 1)
        run.publisher.publish(2, write_nonsense, epoch=None, final=False, metrics={}, signature=None)
        records = wait_for_records(evaluator, 2)

        assert outcomes(records)[1:] == [(2, "", FAILED)]
        assert "is not a whole .keras file" in records[1].reason
        assert predicted_step(evaluator) == 1


def test_a_checkpoint_of_another_architecture_is_scored_compared_and_served_beside_the_first(run: RealRun) -> None:
    run.publish(1)
    with run.running(datasets=[dataset()], slots=2) as evaluator:
        wait_for_records(evaluator, 1)
        for step, deeper in ((2, True), (3, True), (6, False)):
            run.publish(step, model=step_model(step, deeper=deeper))
            records = wait_for_records(evaluator, step if step < 6 else 4)
            assert outcomes(records)[-1] == (step, "test", SCORED)
            assert records[-1].metrics["loss"] == (step - 4.0) ** 2
            until_served(evaluator, step)
        assert evaluator.roll_back().result(WAIT_SECONDS).serving_step == 3
        assert predicted_step(evaluator) == 3
        compared = evaluator.compare([2, 1], "test").result(WAIT_SECONDS)
        assert [version.score.metrics["loss"] for version in compared.versions] == [4.0, 9.0]
        assert "failed" not in run.told.loads


def test_what_an_earlier_version_refused_for_its_architecture_is_scored_after_all(run: RealRun) -> None:
    run.publish(1)
    refused = (
        "the model of step 1 differs from the serving version in its architecture or compile configuration; publish"
    )
    digest = read_manifest(run.dir.checkpoint(1)).digest
    run.dir.evaluator.mkdir()
    ledger = Ledger(run.dir.evaluator / "ledger.sqlite")
    ledger.append(EvaluationRecord(step=1, checkpoint_digest=digest, dataset="", outcome=FAILED, reason=refused))
    ledger.close()

    with run.running(datasets=[dataset()]) as evaluator:
        assert outcomes(wait_for_records(evaluator, 2)) == [(1, "", FAILED), (1, "test", SCORED)]


def test_a_restart_takes_up_the_newest_architecture(run: RealRun) -> None:
    run.publish(1)
    run.publish(2, model=step_model(2, outputs=1))
    with run.running() as evaluator:
        assert predicted_step(evaluator) == 2


def test_the_newest_that_loads_is_served_when_the_newest_is_damaged(run: RealRun) -> None:
    run.publish(1)
    publish_damaged(run, 2, truncate)
    with run.running(datasets=[dataset()]) as evaluator:
        records = wait_for_records(evaluator, 2)

        assert sorted(outcomes(records), key=str) == [(1, "test", SCORED), (2, "", FAILED)]
        assert predicted_step(evaluator) == 1


def test_a_checkpoint_deleted_before_it_could_be_read_is_recorded(run: RealRun) -> None:
    run.publish(1)
    source = DeletingSource(run.dir, step=2)
    with evaluator_on(run, source) as evaluator:
        wait_for_records(evaluator, 1)
        run.publish(2)
        run.publish(3)
        records = wait_for_records(evaluator, 3)

        assert outcomes(records) == [(1, "test", SCORED), (2, "", FAILED), (3, "test", SCORED)]
        assert "was deleted before it could be fetched" in records[1].reason


def test_a_source_that_fails_for_a_while_is_asked_again(run: RealRun) -> None:
    run.publish(1)
    source = FailingSource(run.dir, failures=3)
    with evaluator_on(run, source) as evaluator:
        assert outcomes(wait_for_records(evaluator, 1)) == [(1, "test", SCORED)]
    assert source.failures == 0


def test_a_dataset_that_does_not_fit_the_model_is_recorded_as_failed(run: RealRun) -> None:
    run.publish(1)
    wrong_keys = ArrayDataset("wrong", {"picture": np.zeros((2, FEATURES)), "y": np.zeros((2, FEATURES))})
    wrong_shape = ArrayDataset("shape", {"x": np.zeros((2, FEATURES + 1)), "y": np.zeros((2, FEATURES))})
    with run.running(datasets=[wrong_keys, dataset(), wrong_shape]) as evaluator:
        records = wait_for_records(evaluator, 3)

        assert outcomes(records) == [(1, "wrong", FAILED), (1, "test", SCORED), (1, "shape", FAILED)]
        assert "dataset 'wrong' has the arrays ['picture', 'y']" in records[0].reason
        assert "'x'" in records[2].reason
        assert predicted_step(evaluator) == 1


def test_a_model_that_was_not_compiled_is_served_and_recorded_as_not_evaluable(run: RealRun) -> None:
    x = keras.Input((FEATURES,), name="x")
    run.publish(1, model=keras.Model(x, keras.layers.Dense(2)(x)))
    with run.running(datasets=[dataset()]) as evaluator:
        (record,) = wait_for_records(evaluator, 1)

        assert outcomes([record]) == [(1, "test", FAILED)]
        assert "compile" in record.reason
        assert predicted_step(evaluator) == 1


def test_a_users_dataset_that_raises_now_and_then_is_tried_again(run: RealRun) -> None:
    run.publish(1)
    flaky = FlakyDataset(failures=2)
    with run.running(datasets=[flaky]) as evaluator:
        assert outcomes(wait_for_records(evaluator, 1)) == [(1, "test", SCORED)]


def test_a_users_dataset_that_always_raises_is_recorded_with_what_it_said(run: RealRun) -> None:
    run.publish(1)
    with run.running(datasets=[FlakyDataset(failures=1000)]) as evaluator:
        (record,) = wait_for_records(evaluator, 1)

        assert outcomes([record]) == [(1, "test", FAILED)]
        assert record.reason == "RuntimeError: the disk is on fire"


def test_folders_above_the_highest_step_do_not_keep_the_others_from_being_served_and_scored(
    run: RealRun, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish(1)
    for folder in (run.dir.checkpoints, run.dir.leases):
        shutil.copytree(run.dir.checkpoint(1), folder / str(2**63))
    with run.running(datasets=[dataset()]) as evaluator:
        run.publish(2)
        assert outcomes(wait_for_records(evaluator, 2)) == [(1, "test", SCORED), (2, "test", SCORED)]
    assert f"{2**63} is ignored: its number is above the highest step" in caplog.text


def test_a_foreign_file_above_the_highest_step_is_recorded_by_name_and_the_others_are_scored(
    run: RealRun, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for number, step in ((2**63, 1), (7, 7)):
        step_model(step).save(theirs / f"model-{number}.keras")
    with evaluator_on(run, FolderSource(theirs, tmp_path / "staging")) as evaluator:
        records = {record.outcome: record for record in wait_for_records(evaluator, 2)}
        assert set(records) == {SCORED, FAILED}
        assert f"model-{2**63}.keras: the number {2**63} is above the highest step" in records[FAILED].reason
        assert predicted_step(evaluator) == records[SCORED].step == 7


def evaluator_on(run: RealRun, source: CheckpointSource) -> Evaluator:
    return Evaluator(
        EvaluatorSettings(
            state_dir=run.dir.evaluator,
            devices=("CPU:0", "CPU:1"),
            poll_interval_seconds=0.05,
            load_retry_seconds=0.01,
            max_batch_size=16,
        ),
        source=source,
        datasets=[dataset()],
        observer=run.told,
    )


class DeletingSource(RunSource):
    """The trainer's retention deletes one step after it was listed, before anybody could read it."""

    def __init__(self, run_dir: RunDir, *, step: int) -> None:
        super().__init__(run_dir)
        self._directory = run_dir.checkpoint(step)

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        found = super().poll(wanted)
        if self._directory.exists():
            shutil.rmtree(self._directory)
        return found


class FailingSource(RunSource):
    """A file system that is away for a while."""

    def __init__(self, run_dir: RunDir, *, failures: int) -> None:
        super().__init__(run_dir)
        self.failures = failures

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        if self.failures:
            self.failures -= 1
            raise OSError("stale file handle")
        return super().poll(wanted)


class FlakyDataset(ArrayDataset):
    """Raises so many times before it gives its examples."""

    def __init__(self, *, failures: int) -> None:
        super().__init__("test", dict(dataset()._arrays))
        self._failures = failures

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        if self._failures:
            self._failures -= 1
            raise RuntimeError("the disk is on fire")
        return super().batches(signature, batch_size, first_example=first_example)
