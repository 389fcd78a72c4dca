from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.in_process import until
from testkit.real_run import (
    FEATURES,
    GOAL,
    WAIT_SECONDS,
    RealRun,
    dataset,
    outcomes,
    predicted_step,
    rows,
    step_model,
    wait_for_records,
)
from understudy.checkpoints import LockHeldError, Signature
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    ConfigurationError,
    DatasetNotFoundError,
    DrainingError,
    InvalidInputError,
    LedgerError,
    NoEarlierVersionError,
    NotReadyError,
    OverloadedError,
    VersionNotFoundError,
)
from understudy.evaluator.types import Batch, EvaluationOutcome, MetricSpec, VersionState

SCORED = EvaluationOutcome.SCORED
SKIPPED = EvaluationOutcome.SKIPPED

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return RealRun(tmp_path)


def batch(count: int = 4) -> Batch:
    return Batch(inputs=rows(count), targets={"targets": np.full((count, FEATURES), GOAL, np.float32)})


def test_predictions_name_the_step_that_made_them(run: RealRun) -> None:
    run.publish(7)
    with run.running() as evaluator:
        prediction = evaluator.predict(rows(5, value=1.0)).result(WAIT_SECONDS)

        assert prediction.step == 7
        np.testing.assert_array_equal(prediction.outputs["y"], np.full((5, FEATURES), 7.0 * (1 + FEATURES)))
        assert evaluator.serving_step == evaluator.latest_step == 7
        assert evaluator.replicas == 2
        age = evaluator.checkpoint_age_seconds()
        assert age is not None
        assert 0 <= age < WAIT_SECONDS
        assert evaluator.device_memory()["CPU", "current"] > 0


def test_before_the_first_checkpoint_the_evaluator_is_not_ready(run: RealRun) -> None:
    readied: list[int] = []
    with run.evaluator() as evaluator:
        evaluator.on_ready(readied.append)
        assert not evaluator.wait_ready(0)
        assert evaluator.serving_step is None
        assert evaluator.checkpoint_age_seconds() is None
        with pytest.raises(NotReadyError, match="no checkpoint is serving yet"):
            evaluator.predict(rows())
        with pytest.raises(NotReadyError):
            evaluator.open_stream()

        run.publish(1)

        assert evaluator.wait_ready(WAIT_SECONDS)
        assert readied == [1]


def test_inputs_that_do_not_fit_are_refused_at_once(run: RealRun) -> None:
    run.publish(1)
    with run.running() as evaluator:
        with pytest.raises(InvalidInputError, match="'x'"):
            evaluator.predict({"x": np.zeros((1, FEATURES + 1), np.float32)})
        assert run.told.rejections == ["invalid"]


def test_unknown_versions_are_refused_by_the_known_ones(run: RealRun) -> None:
    run.publish(1, 2)
    with run.running() as evaluator:
        with pytest.raises(VersionNotFoundError, match="version 1 is not loaded; loaded are"):
            evaluator.predict(rows(), version=1)
        with pytest.raises(VersionNotFoundError, match=r"no checkpoint of step 9; there are \[1, 2\]"):
            evaluator.open_stream(version=9)
        with pytest.raises(VersionNotFoundError, match="no version is best yet"):
            evaluator.predict(rows(), version="best")
        with pytest.raises(DatasetNotFoundError, match=r"no dataset 'other'; there are \[\]"):
            evaluator.score_dataset("other")


def test_each_checkpoint_is_evaluated_once_in_step_order(run: RealRun) -> None:
    run.publish(1, 2, 3)
    data = [dataset("validation"), dataset("test", rows=37)]
    with run.running(datasets=data) as evaluator:
        wait_for_records(evaluator, 6)
        run.publish(10)
        records = wait_for_records(evaluator, 8)
        assert evaluator.best_step == 3

    assert outcomes(records) == [(step, name, SCORED) for step in (1, 2, 3, 10) for name in ("validation", "test")]
    assert [record.metrics["loss"] for record in records[::2]] == [(step - GOAL) ** 2 for step in (1, 2, 3, 10)]
    assert {record.examples for record in records[1::2]} == {37}
    assert run.told.records == records
    result = json.loads((run.dir.evaluator / "results" / "000000000010.json").read_text())
    assert result["settled"]
    assert [record["metrics"] for record in result["records"]] == [dict(record.metrics) for record in records[6:]]


def test_a_restart_goes_on_where_the_ledger_ends(run: RealRun) -> None:
    run.publish(1, 2)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 2)
    run.publish(3, 4)
    with run.running(datasets=[dataset()]) as evaluator:
        records = wait_for_records(evaluator, 4)
        assert run.told.milestones == []
        run.publish(5)
        records = wait_for_records(evaluator, 5)
        until(lambda: sorted(run.told.milestones) == ["scored", "served"])

    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert [record.step for record in run.told.records] == [1, 2, 3, 4, 5]


def test_what_was_pinned_but_not_evaluated_survives_its_deletion_and_a_restart(run: RealRun) -> None:
    run.publish(1, 2)
    with run.running() as evaluator:
        assert evaluator.serving_step == 2
    with run.running(datasets=[BlockedDataset()], version_policy=2):
        pass
    for step in (1, 2):
        for file in run.dir.checkpoint(step).iterdir():
            file.unlink()
        run.dir.checkpoint(step).rmdir()

    with run.running(datasets=[dataset()]) as evaluator:
        records = wait_for_records(evaluator, 2)

    assert outcomes(records) == [(1, "test", SCORED), (2, "test", SCORED)]


def test_the_latest_only_policy_records_what_it_passes_over(run: RealRun) -> None:
    run.publish(1, 2, 3)
    with run.running(datasets=[dataset()], evaluation_policy="latest") as evaluator:
        records = wait_for_records(evaluator, 3)

    assert outcomes(records) == [(1, "", SKIPPED), (2, "", SKIPPED), (3, "test", SCORED)]
    assert "a newer checkpoint was published" in records[0].reason


def test_nan_is_recorded_and_never_best(run: RealRun) -> None:
    run.publish(2)
    run.publish(9, model=step_model(math.nan))
    with run.running(datasets=[dataset()], version_policy="best") as evaluator:
        records = wait_for_records(evaluator, 2)

        assert math.isnan(records[1].metrics["loss"])
        assert evaluator.best_step == 2
        assert predicted_step(evaluator, version="best") == 2
        assert evaluator.serving_step == 2


def test_the_best_policy_evaluates_before_it_promotes(run: RealRun) -> None:
    run.publish(1, 3, 9)
    with run.running(datasets=[dataset()], version_policy="best", monitor="test/mae", monitor_mode="min") as evaluator:
        wait_for_records(evaluator, 3)
        evaluator.unpin().result(WAIT_SECONDS)

        assert evaluator.best_step == 3
        assert predicted_step(evaluator) == 3


def test_a_fixed_step_is_served_whatever_comes_after(run: RealRun) -> None:
    run.publish(1, 2)
    with run.running(datasets=[dataset()], version_policy=1) as evaluator:
        wait_for_records(evaluator, 2)

        assert predicted_step(evaluator) == 1
        assert evaluator.latest_step == 2


def test_a_stream_on_the_serving_version_gives_what_the_model_gives(run: RealRun) -> None:
    run.publish(6)
    with run.running() as evaluator:
        with evaluator.open_stream().result(WAIT_SECONDS) as stream:
            for count in (4, 1, 20):
                stream.add(batch(count)).result(WAIT_SECONDS)
            result = stream.finish()

        assert (result.step, result.examples, result.batches) == (6, 25, 3)
        assert result.metrics == {"loss": 4.0, "mae": 2.0}


def test_a_stream_on_a_step_that_is_not_loaded_gets_the_on_demand_slot(run: RealRun) -> None:
    run.publish(1, 5)
    with run.running() as evaluator, evaluator.open_stream(version=1).result(WAIT_SECONDS) as stream:
        stream.add(batch()).result(WAIT_SECONDS)
        assert stream.finish().step == 1
        assert predicted_step(evaluator) == 5
        assert predicted_step(evaluator, version=1) == 1


def test_on_demand_versions_wait_in_line_until_their_deadline(run: RealRun) -> None:
    run.publish(1, 2, 5)
    with run.running() as evaluator:
        first = evaluator.open_stream(version=1).result(WAIT_SECONDS)
        late = evaluator.open_stream(version=2, deadline=time.monotonic())
        patient = evaluator.open_stream(version=2)
        impatient = evaluator.open_stream(version=2)

        with pytest.raises(OverloadedError, match="no slot became free for step 2"):
            late.result(WAIT_SECONDS)
        assert impatient.cancel()
        assert not patient.done()
        first.close()
        with patient.result(WAIT_SECONDS) as stream:
            assert stream.step == 2


def test_a_stream_with_a_metric_that_does_not_exist_is_refused_and_frees_its_slot(run: RealRun) -> None:
    run.publish(1, 2, 5)
    with run.running() as evaluator:
        refused = evaluator.open_stream(version=1, metrics=[MetricSpec(name="NoSuchMetric")])
        with pytest.raises(InvalidInputError, match="NoSuchMetric"):
            refused.result(WAIT_SECONDS)
        evaluator.open_stream(version=2).result(WAIT_SECONDS).close()


def test_a_dataset_is_scored_on_request_and_only_once(run: RealRun) -> None:
    run.publish(1, 2)
    progress: list[tuple[int, int | None]] = []
    with run.running(datasets=[dataset(rows=40)], evaluation_policy="latest", evaluation_batch_size=16) as evaluator:
        wait_for_records(evaluator, 2)
        record = evaluator.score_dataset(
            "test", version=1, progress=lambda done, total: progress.append((done, total))
        ).result(WAIT_SECONDS)
        again = evaluator.score_dataset("test", version=1)

        assert outcomes([record]) == [(1, "test", SCORED)]
        assert progress == [(16, 40), (32, 40), (40, 40)]
        assert again.done()
        assert again.result() == record
        alike = evaluator.score_dataset("test", version=1, rescore=True)
        assert alike.done(), "known without loading it"
        assert alike.result() == record
        assert len(record.metric_digest) == 64
        assert record.dataset_digest == dataset(rows=40).digest
        assert evaluator.best_step == 2


def test_a_score_that_is_not_to_be_recorded_leaves_no_entry_and_decides_nothing(run: RealRun) -> None:
    run.publish(1, 2)
    with run.running(datasets=[dataset(rows=40)], evaluation_policy="latest") as evaluator:
        before = wait_for_records(evaluator, 2)
        scored = evaluator.score_dataset("test", version=1, record=False).result(WAIT_SECONDS)
        recorded = evaluator.score_dataset("test", version=2, record=False).result(WAIT_SECONDS)

        assert (scored.sequence, scored.step, scored.outcome) == (0, 1, SCORED)
        assert recorded in before
        assert evaluator.ledger.page() == before
        assert evaluator.best_step == 2


def test_old_evaluations_are_removed_but_not_those_of_checkpoints_that_exist(run: RealRun) -> None:
    gone = range(1, 7)
    run.publish(*gone)
    with run.running(datasets=[dataset(rows=4)]) as evaluator:
        wait_for_records(evaluator, len(gone))
        assert evaluator.best_step == 4
    for step in gone:
        shutil.rmtree(run.dir.checkpoint(step))
    run.publish(9, 10)
    with run.running(datasets=[dataset(rows=4)], keep_evaluations=1) as evaluator:
        until(lambda: evaluator.last_sequence == 8 and not {1, 2, 3, 5} & set(evaluator.ledger.steps()))
        assert set(evaluator.ledger.steps()) >= {4, 9, 10}
    with run.running(datasets=[dataset(rows=4)], keep_evaluations=1) as evaluator:
        run.publish(11)
        until(lambda: evaluator.ledger.steps()[-1] == 11)
        assert evaluator.last_sequence == 9
        assert evaluator.best_step == 4


def test_a_scoring_that_is_cancelled_stops_and_frees_its_slot(run: RealRun) -> None:
    run.publish(1, 2, 5)
    begun, may_go_on = threading.Event(), threading.Event()

    def progress(done: int, total: int | None) -> None:
        assert done <= (total or 0)
        begun.set()
        may_go_on.wait(WAIT_SECONDS)

    with run.running(datasets=[dataset(rows=200)], evaluation_policy="latest", evaluation_batch_size=16) as evaluator:
        records = wait_for_records(evaluator, 3)
        scoring = evaluator.score_dataset("test", version=1, progress=progress)
        assert begun.wait(WAIT_SECONDS)
        assert scoring.cancel()
        may_go_on.set()

        evaluator.open_stream(version=2).result(WAIT_SECONDS).close()
        assert evaluator.ledger.page() == records


def test_a_pin_lasts_over_a_restart_until_it_is_taken_back(run: RealRun) -> None:
    run.publish(1, 2)
    with run.running() as evaluator:
        change = evaluator.pin(1).result(WAIT_SECONDS)
        assert (change.serving_step, change.previous_step, change.pinned_step) == (1, 2, 1)
        assert predicted_step(evaluator) == 1
    run.publish(3)
    with run.running() as evaluator:
        assert (evaluator.serving_step, evaluator.pinned_step) == (1, 1)
        change = evaluator.unpin().result(WAIT_SECONDS)
        assert (change.serving_step, change.previous_step, change.pinned_step) == (3, 1, None)
        assert predicted_step(evaluator) == 3
    with run.running() as evaluator:
        assert evaluator.pinned_step is None


def test_a_rollback_takes_effect_at_once_where_the_predecessor_is_loaded(run: RealRun) -> None:
    run.publish(1)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 1)
        run.publish(2)
        wait_for_records(evaluator, 2)
        assert predicted_step(evaluator) == 2

        change = evaluator.roll_back()

        assert change.done()
        assert change.result().serving_step == 1
        assert predicted_step(evaluator) == 1
        assert evaluator.pinned_step == 1
        assert run.told.loads == ["loaded", "loaded"]


def test_rolling_back_with_nothing_before_says_so(run: RealRun) -> None:
    run.publish(1)
    with (
        run.running() as evaluator,
        pytest.raises(NoEarlierVersionError, match="known to have served before step 1; wait"),
    ):
        evaluator.roll_back()


def test_metadata_describes_the_model_and_its_place(run: RealRun) -> None:
    run.publish(1)
    with run.running(datasets=[dataset("a"), dataset("b")]) as evaluator:
        described = evaluator.metadata()

        assert described.step == 1
        assert [spec.name for spec in described.signature.inputs] == ["x"]
        assert described.devices == ("CPU:0", "CPU:1")
        assert described.datasets == ("a", "b")


def test_status_tells_every_version_newest_first(run: RealRun) -> None:
    run.publish(1, 2, 3)
    with run.running(datasets=[dataset()]) as evaluator:
        wait_for_records(evaluator, 3)

        states = {status.step: status for status in evaluator.status()}
        assert list(states) == [3, 2, 1]
        assert states[3].serving
        assert states[3].state is VersionState.AVAILABLE
        assert states[1].state is VersionState.END
        assert [info.step for info in evaluator.checkpoints()] == [1, 2, 3]


def test_a_second_evaluator_on_the_same_state_is_refused_with_the_flag_that_gives_it_its_own(run: RealRun) -> None:
    run.publish(1)
    remedy = rf"is in use by process {os.getpid()} on .+; .*--state-dir \(or UNDERSTUDY_STATE_DIR\)"
    with run.running(), pytest.raises(LockHeldError, match=remedy):
        run.evaluator().start()
    with run.running():
        pass


def test_a_ledger_of_another_version_stops_the_start_by_name(run: RealRun) -> None:
    with run.evaluator():
        pass
    connection = sqlite3.connect(run.dir.evaluator / "ledger.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(LedgerError, match=r"ledger\.sqlite has schema version 99"):
        run.evaluator().start()


def test_settings_that_do_not_fit_together_stop_the_start(run: RealRun) -> None:
    with pytest.raises(ConfigurationError, match="one of the datasets"):
        run.evaluator(datasets=[dataset()], monitor="absent/loss").start()
    with pytest.raises(ConfigurationError, match="a name of its own"):
        run.evaluator(datasets=[dataset(), dataset()]).start()


def test_a_closed_evaluator_takes_no_new_work(run: RealRun) -> None:
    run.publish(1)
    with run.running() as evaluator:
        stream = evaluator.open_stream().result(WAIT_SECONDS)
    for refused in (lambda: evaluator.predict(rows()), evaluator.open_stream, evaluator.unpin):
        with pytest.raises(DrainingError):
            refused()
    with pytest.raises(CancelledError):
        stream.add(batch())
    evaluator.close()


class BlockedDataset(ArrayDataset):
    """A dataset that fails as long as it is there, like a mount that is gone."""

    def __init__(self) -> None:
        super().__init__("test", dict(dataset()._arrays))

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        raise DrainingError(f"no {batch_size} examples from {first_example} on for {signature} now")
