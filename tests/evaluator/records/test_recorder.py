from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.in_process import until
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.result_files import ResultFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, EvaluationResult

pytestmark = pytest.mark.usefixtures("logical_cpus")

DATASETS = [
    ArrayDataset(name, {"x": np.full((2, 1), place, np.float32), "y": np.zeros(2)})
    for place, name in enumerate(["validation", "test"])
]


WAIT_SECONDS = 60.0
MISSING = 50
STOPS_AFTER = 3


class RecorderHarness:
    """A recorder with what it writes to."""

    def __init__(self, folder: Path, results: ResultFiles | None = None) -> None:
        self.told: list[EvaluationRecord] = []
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.results = results or ResultFiles(folder / "results")
        self.recorder = Recorder(
            ledger=self.ledger,
            results=self.results,
            summaries=Summaries(folder / "tensorboard", self.ledger.curves),
            datasets=DATASETS,
            observer=SilentObserver(),
            listener=self.told.append,
        )

    def score(
        self, step: int, dataset: ArrayDataset, digests: Mapping[str, str] | None = None, **metrics: float
    ) -> EvaluationRecord:
        result = EvaluationResult(
            metrics=metrics,
            examples=2,
            batches=1,
            step=step,
            waiting_seconds=0,
            computing_seconds=0,
            metric_digests=digests or {},
        )
        return self.recorder.record_score(f"d{step}", dataset, result, duration_seconds=0.1)

    def result(self, step: int) -> Any:
        return json.loads(self.results.path(step).read_text())

    def close(self) -> None:
        self.recorder.close()
        self.ledger.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[RecorderHarness]:
    harness = RecorderHarness(tmp_path)
    yield harness
    harness.close()


def test_what_remains_shrinks_with_each_score(harness: RecorderHarness) -> None:
    assert harness.recorder.remaining(1, "d1") == DATASETS
    harness.score(1, DATASETS[0], loss=0.5)
    assert harness.recorder.remaining(1, "d1") == DATASETS[1:]
    harness.score(1, DATASETS[1], loss=0.5)
    assert harness.recorder.remaining(1, "d1") == []


def test_nothing_remains_of_a_checkpoint_that_failed_as_a_whole(harness: RecorderHarness) -> None:
    harness.recorder.record_reason(1, "d1", EvaluationOutcome.FAILED, "torn")

    assert harness.recorder.remaining(1, "d1") == []
    assert harness.recorder.remaining(1, "another") == DATASETS


def test_a_result_file_says_when_it_is_settled(harness: RecorderHarness) -> None:
    harness.score(1, DATASETS[0], loss=math.nan)
    assert harness.result(1)["settled"] is False
    harness.score(1, DATASETS[1], loss=0.25)

    assert harness.result(1)["settled"] is True
    assert [record["metrics"]["loss"] for record in harness.result(1)["records"]] == ["nan", 0.25]


def test_a_score_that_is_recorded_already_is_told_once(harness: RecorderHarness) -> None:
    first = harness.score(1, DATASETS[0], loss=0.5)
    again = harness.score(1, DATASETS[0], loss=0.6)

    assert again == first
    assert harness.told == [first]


def test_a_result_file_that_a_crash_left_out_is_written_on_recovery(harness: RecorderHarness) -> None:
    harness.score(1, DATASETS[0], loss=0.5)
    harness.score(2, DATASETS[0], loss=0.5)
    for step in (1, 2):
        harness.results.path(step).unlink()

    harness.recorder.recover()

    assert [harness.result(step)["step"] for step in (1, 2)] == [1, 2]


class StoppingFiles(ResultFiles):
    """Stops in the middle of the files that are missing, until it may go on."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.published: list[int] = []
        self.stopped = threading.Event()
        self.may_go_on = threading.Event()

    def publish(self, step: int, records: Sequence[EvaluationRecord], *, settled: bool) -> None:
        super().publish(step, records, settled=settled)
        self.published.append(step)
        if len(self.published) == STOPS_AFTER:
            self.stopped.set()
            assert self.may_go_on.wait(WAIT_SECONDS)


def test_many_missing_result_files_are_written_while_others_are_recorded_and_no_longer_than_until_the_end(
    harness: RecorderHarness, tmp_path: Path
) -> None:
    for step in range(MISSING):
        harness.ledger.append(
            EvaluationRecord(step=step, checkpoint_digest="d", dataset="", outcome=EvaluationOutcome.SKIPPED)
        )
    harness.close()

    stopping = StoppingFiles(tmp_path / "results")
    interrupted = RecorderHarness(tmp_path, stopping)
    interrupted.recorder.start_recovering()
    assert stopping.stopped.wait(WAIT_SECONDS)
    entry = (MISSING, "d", EvaluationOutcome.SKIPPED, "recorded meanwhile")
    recording = threading.Thread(target=interrupted.recorder.record_reason, args=entry)
    recording.start()
    closing = threading.Thread(target=interrupted.recorder.close)
    closing.start()
    until(lambda: interrupted.recorder._recovery._closing)
    stopping.may_go_on.set()
    for thread in (recording, closing):
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert len(stopping.published) <= STOPS_AFTER + 2
    assert MISSING in stopping.published
    interrupted.ledger.close()

    again = RecorderHarness(tmp_path)
    again.recorder.start_recovering()
    until(lambda: len(again.results.steps()) == MISSING + 1)
    again.close()
    assert again.result(MISSING - 1)["records"][0]["outcome"] == "skipped"


def losses_in_tensorboard(harness: RecorderHarness, run: str) -> list[tuple[int, float]]:
    return values_in_tensorboard(harness, run, "loss")


def values_in_tensorboard(harness: RecorderHarness, run: str, metric: str) -> list[tuple[int, float]]:
    import tensorflow as tf

    return [
        (event.step, float(tf.make_ndarray(event.tensor_proto)))
        for event in points_in_tensorboard(harness, run, metric)
    ]


def points_in_tensorboard(harness: RecorderHarness, run: str, metric: str) -> Any:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    return EventMultiplexer().AddRunsFromDirectory(str(harness.folder / "tensorboard")).Reload().Tensors(run, metric)


@pytest.mark.parametrize("lost_bytes", [0, 1, 70, 10**6])
def test_summaries_that_a_crash_left_out_are_written_on_recovery_and_none_twice(
    harness: RecorderHarness, tmp_path: Path, lost_bytes: int
) -> None:
    for step in (10, 20, 30):
        harness.score(step, DATASETS[0], loss=step / 8, accuracy=0.5)
    harness.recorder.close()
    (file,) = (tmp_path / "tensorboard" / "validation").iterdir()
    file.write_bytes(file.read_bytes()[: max(0, file.stat().st_size - lost_bytes)])

    for _ in range(2):
        restarted = RecorderHarness(tmp_path)
        restarted.recorder.recover()
        restarted.close()

    assert sorted(losses_in_tensorboard(harness, "validation")) == [(10, 1.25), (20, 2.5), (30, 3.75)]
    times = {event.step: event.wall_time for event in points_in_tensorboard(harness, "validation", "accuracy")}
    assert times == {record.step: record.recorded_at for record in harness.told}, "also if it was written later"


def test_tensorboard_reads_one_run_per_dataset_at_the_right_steps(harness: RecorderHarness) -> None:
    harness.score(10, DATASETS[0], loss=0.5, accuracy=0.75)
    harness.score(20, DATASETS[0], loss=0.25)
    harness.score(10, DATASETS[1], loss=1.5)
    harness.recorder.close()

    assert {run.name for run in (harness.folder / "tensorboard").iterdir()} == {"validation", "test"}
    assert losses_in_tensorboard(harness, "validation") == [(10, 0.5), (20, 0.25)]
    assert losses_in_tensorboard(harness, "test") == [(10, 1.5)]


def test_a_result_file_that_cannot_be_written_does_not_undo_the_entry(
    harness: RecorderHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.results.path(1).mkdir()

    record = harness.score(1, DATASETS[0], loss=0.5)

    assert harness.ledger.page() == [record]
    assert "result file not written" in caplog.text


def test_a_summary_that_cannot_be_written_does_not_undo_the_entry(
    harness: RecorderHarness, caplog: pytest.LogCaptureFixture
) -> None:
    (harness.folder / "tensorboard").write_text("no folder")

    record = harness.score(1, DATASETS[0], loss=0.5)

    assert harness.ledger.page() == [record]
    assert "summary not written" in caplog.text


def test_who_reads_of_a_score_in_the_ledger_finds_it_ranked_before_slow_files_are_written(
    harness: RecorderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked: list[int] = []
    publish = harness.results.publish

    def look_and_publish(*args: Any, **more: Any) -> None:
        ranked.append(len(harness.told))
        publish(*args, **more)

    monkeypatch.setattr(harness.results, "publish", look_and_publish)
    harness.score(1, DATASETS[0], loss=0.5)
    assert ranked == [1]


def test_a_closed_recorder_leaves_the_ledger_to_its_owner(harness: RecorderHarness) -> None:
    harness.score(1, DATASETS[0], loss=0.5)
    harness.recorder.close()
    assert [record.step for record in harness.ledger.page()] == [1]


def test_a_metric_of_another_configuration_has_a_curve_of_its_own(tmp_path: Path) -> None:
    harness = RecorderHarness(tmp_path)
    harness.score(1, DATASETS[0], loss=0.5)
    harness.score(2, DATASETS[0], {"loss": "l" * 64, "top": "3" * 64}, loss=0.25, top=0.5)
    harness.close()

    again = RecorderHarness(tmp_path)
    again.score(3, DATASETS[0], {"loss": "l" * 64, "top": "5" * 64}, loss=0.125, top=0.75)
    assert losses_in_tensorboard(again, "validation") == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert values_in_tensorboard(again, "validation", "top") == [(2, 0.5)]
    assert values_in_tensorboard(again, "validation-55555555", "top") == [(3, 0.75)]
    again.recorder.recover()
    assert values_in_tensorboard(again, "validation-55555555", "top") == [(3, 0.75)]
    again.close()


def test_a_changed_dataset_is_noted_once_and_has_a_curve_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = RecorderHarness(tmp_path)
    harness.score(1, DATASETS[0], loss=0.5)
    changed = ArrayDataset("validation", {"x": np.full((2, 1), 7.0, np.float32), "y": np.zeros(2)})

    first, second = (harness.score(step, changed, loss=0.75) for step in (1, 2))
    (note,) = first.notes
    assert note.startswith("the content of dataset 'validation' has changed: entries up to 1 were scored on other")
    assert second.notes == ()
    assert losses_in_tensorboard(harness, "validation") == [(1, 0.5)]
    assert losses_in_tensorboard(harness, f"validation-{changed.digest[:8]}") == [(1, 0.75), (2, 0.75)]
    harness.close()

    again = RecorderHarness(tmp_path)  # with the old content
    again.recorder.recover()
    assert "the content of dataset 'validation' has changed: entries up to 3" in caplog.text
    again.score(3, DATASETS[0], loss=0.25)
    assert losses_in_tensorboard(again, "validation") == [(1, 0.5), (3, 0.25)]
    again.close()
