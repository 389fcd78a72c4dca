"""What evaluations recorded about examples, and what is said when it is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.evaluation import example_outcomes, example_queries
from understudy.evaluator.evaluation.class_decisions import Decisions
from understudy.evaluator.evaluation.example_outcomes import Outcomes, PredictedClasses, PredictionReader
from understudy.evaluator.evaluation.example_queries import ExampleList, ExampleQueries
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    InvalidInputError,
    LedgerError,
    NotEvaluableError,
    VersionNotFoundError,
)
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.result_files import ResultFiles, TableFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.types import EvaluationOutcome, EvaluationResult

EXAMPLES = 20
DATASET = ArrayDataset(
    "test", {"x": np.arange(EXAMPLES, dtype=np.float32)[:, np.newaxis], "y": np.arange(EXAMPLES) % 2}
)
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 1)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, 2)),),
)


def content(right: Any = None, hardest: tuple[int, ...] = (), *notes: str, predicted: Any = None) -> dict[str, Any]:
    outcomes = Outcomes()
    if right is not None:
        outcomes.add(np.asarray(right))
    return {
        "examples": EXAMPLES,
        "outputs": {},
        "slices": [],
        "hardest": [{"index": index, "loss": 1.0, "outputs": {}} for index in hardest],
        "outcomes": outcomes.document(),
        "notes": list(notes),
        **({} if predicted is None else {"predicted": {"y": predicted}}),
    }


class Harness:
    """A recorder, and queries over what it recorded."""

    def __init__(self, folder: Path, *, keep: int | None = None) -> None:
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.tables = TableFiles(folder / "tables")
        self.recorder = Recorder(
            ledger=self.ledger,
            results=ResultFiles(folder / "results"),
            summaries=Summaries(folder / "tensorboard", self.ledger.curves),
            datasets=[DATASET],
            observer=SilentObserver(),
            listener=lambda _: None,
            keep=keep,
            tables=self.tables,
        )
        self.datasets = {"test": DATASET}
        self.sliced: tuple[str, ...] = ()

    def record(self, step: int, tables: dict[str, Any] | None, dataset: ArrayDataset = DATASET) -> int:
        result = EvaluationResult(
            metrics={}, examples=EXAMPLES, batches=1, step=step, waiting_seconds=0, computing_seconds=0
        )
        recorded = self.recorder.record_score(f"d{step}", dataset, result, duration_seconds=0.1, tables=tables)
        return recorded.sequence

    @property
    def queries(self) -> ExampleQueries:
        return ExampleQueries(
            ledger=self.ledger, tables=self.tables, datasets=self.datasets, batch_size=6, sliced=self.sliced
        )

    def examples(self, kind: Any, step: int, *, is_wanted: Callable[[], bool] = lambda: True, **chosen: Any) -> Any:
        options = {"baseline_step": None, "limit": 100, "signature": SIGNATURE, **chosen}
        found: ExampleList = self.queries.examples(kind, step, "test", is_wanted=is_wanted, **options)
        return found


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.recorder.close()
    harness.ledger.close()


def test_examples_are_read_from_their_places_in_any_order(harness: Harness) -> None:
    harness.record(1, content(hardest=(17, 0, 6, 5)))
    found = harness.examples("hardest", 1, limit=3)
    assert (list(found.indices), found.total) == ([17, 0, 6], 4)
    assert found.batch is not None
    assert found.batch.inputs["x"].ravel().tolist() == [17, 0, 6]
    assert found.batch.targets["targets"].tolist() == [1, 0, 0]


def test_flips_are_compared_without_scoring_again(harness: Harness) -> None:
    harness.record(1, content(np.arange(EXAMPLES) < 10))
    harness.record(2, content(np.arange(EXAMPLES) % 5 > 0))
    wrong = harness.examples("newly_wrong", 2, baseline_step=1)
    right = harness.examples("newly_right", 2, baseline_step=1, limit=1)
    assert list(wrong.indices) == [0, 5]
    assert (list(right.indices), right.total) == ([11], 8)
    assert (wrong.record.step, wrong.baseline.step, wrong.flips.both_right) == (2, 1, 8)


def predicted(classes: Any) -> dict[str, Any] | None:
    found = PredictedClasses()
    for part in np.array_split(np.asarray(classes), 3):
        decided = Decisions(
            right=np.ones(len(part), bool),
            examples=np.arange(len(part)),
            predicted=part,
            actual=part,
            probabilities=None,
            weights=np.ones(len(part)),
            left_out=0,
        )
        found.add(decided, len(part))
    return found.document()


def test_flips_say_what_both_versions_predicted(harness: Harness) -> None:
    actual = np.arange(EXAMPLES) % 4
    before = np.where(np.arange(EXAMPLES) < 18, actual, 300)
    after = np.where(np.arange(EXAMPLES) == 7, 2, actual)
    for step, classes in ((1, before), (2, after)):
        harness.record(step, content(classes == actual, predicted=predicted(classes)))
    wrong = harness.examples("newly_wrong", 2, baseline_step=1)
    right = harness.examples("newly_right", 2, baseline_step=1)
    assert list(wrong.described) == [{"outputs": {"y": {"actual": [3], "predicted": [2], "baseline": [3]}}}]
    assert [one["outputs"]["y"] for one in right.described] == [
        {"actual": [place], "predicted": [place], "baseline": [300]} for place in (2, 3)
    ]
    (first, *rest) = harness.queries.flips(2, "test", baseline_step=1).described
    assert first == {"index": 7, **wrong.described[0]}
    assert [one["index"] for one in rest] == [18, 19]
    assert "predicted" not in harness.queries.tables(2, "test").content

    harness.record(3, content(classes == actual))
    assert list(harness.examples("newly_wrong", 3, baseline_step=1).described) == [{}], "recorded by an older version"
    assert not harness.queries.flips(3, "test", baseline_step=1).described


def test_what_was_predicted_for_too_many_examples_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_outcomes, "MAX_NUMBERS", 10)
    assert predicted(np.arange(6)) is None
    assert predicted(np.arange(5)) is not None
    for damaged in ({}, {**predicted(np.arange(5)), "counts": "AAAA"}, {**predicted(np.arange(5)), "dtype": "uint64"}):  # type: ignore[dict-item]
        with pytest.raises(LedgerError, match="damaged"):
            PredictionReader(damaged)


def test_labels_that_hold_at_once_and_the_first_items_of_a_sequence_are_read_as_they_were_predicted() -> None:
    random = np.random.default_rng(0)
    labels = random.random((7, 11)) < 0.3
    reader = PredictionReader(predicted(labels) or {})
    assert [reader.of(index) for index in range(7)] == [[np.flatnonzero(one)[:8].tolist()] for one in labels]

    examples, classes = np.repeat([0, 2, 3], [2, 11, 1]), np.arange(14)
    found = PredictedClasses()
    ones = np.ones(14)
    found.add(
        Decisions(
            right=ones[:4], examples=examples, predicted=classes, actual=classes, probabilities=None, weights=ones,
            left_out=0,
        ),
        4,
    )  # fmt: skip
    reader = PredictionReader(found.document() or {})
    assert [reader.of(index) for index in range(4)] == [[0, 1], [], list(range(2, 10)), [13]]


def test_evaluations_without_tables_are_told_from_absent_ones(harness: Harness) -> None:
    harness.record(1, None)
    with pytest.raises(VersionNotFoundError, match=r"step 1 was scored on 'test' without tables.*--tables"):
        harness.queries.tables(1, "test")
    with pytest.raises(VersionNotFoundError, match=r"step 2 has no score.*No evaluation on 'test' has tables"):
        harness.queries.tables(2, "test")
    for dataset in (DATASET, None):
        reason = "unknown arrays" if dataset else "no such loss"
        harness.recorder.record_reason(4, "d4", EvaluationOutcome.FAILED, reason, dataset=dataset)
        said = rf"step 4 has no score on 'test', because its evaluation failed: {reason}\. No evaluation"
        with pytest.raises(VersionNotFoundError, match=said):
            harness.queries.tables(4, "test")
    harness.record(3, content())
    with pytest.raises(VersionNotFoundError, match="There are tables of the steps 3"):
        harness.queries.tables(2, "test")
    assert "outcomes" not in harness.queries.tables(3, "test").content


def test_numbers_have_no_flips_and_a_loss_without_examples_has_no_hardest(harness: Harness) -> None:
    harness.record(1, content(None, (), "no output has classes"))
    harness.record(2, content([True] * EXAMPLES))
    with pytest.raises(NotEvaluableError, match="not recorded: no output has classes"):
        harness.examples("newly_wrong", 1, baseline_step=2)
    with pytest.raises(NotEvaluableError, match="no hardest examples of step 1"):
        harness.examples("hardest", 1)


def test_evaluations_on_different_content_are_not_compared(harness: Harness) -> None:
    harness.record(1, content([True] * EXAMPLES))
    other = ArrayDataset("test", {"x": np.zeros((EXAMPLES, 1), np.float32), "y": np.zeros(EXAMPLES)})
    harness.record(2, content([True] * EXAMPLES, (3,)), other)
    with pytest.raises(NotEvaluableError, match="changed between the evaluations of step 1 and step 2"):
        harness.examples("newly_wrong", 2, baseline_step=1)
    hardest = harness.examples("hardest", 2)
    assert (list(hardest.indices), hardest.batch) == ([3], None)
    assert "has changed since" in hardest.notes[0]


def test_a_dataset_that_is_gone_leaves_the_places(harness: Harness) -> None:
    harness.record(1, content(hardest=(3,)))
    harness.datasets = {}
    assert "no longer one of the server's" in harness.examples("hardest", 1).notes[0]


def test_content_is_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.record(1, content(hardest=(4, 2, 1)))
    size = 4 + DATASET.batches(SIGNATURE, 1).__next__().targets["targets"].itemsize
    monkeypatch.setattr(example_queries, "MAX_CONTENT_BYTES", 2 * size)
    found = harness.examples("hardest", 1)
    assert found.batch.inputs["x"].ravel().tolist() == [4, 2]
    assert len(found.indices) == 3
    assert "the first 2 examples" in found.notes[0]
    monkeypatch.setattr(example_queries, "MAX_CONTENT_BYTES", 1)
    assert harness.examples("hardest", 1).batch is None


def test_an_answer_that_is_no_longer_wanted_is_not_read_on(harness: Harness) -> None:
    harness.record(1, content(hardest=(19,)))
    answers = iter([True, True, False])
    with pytest.raises(CancelledError):
        harness.examples("hardest", 1, is_wanted=lambda: next(answers))


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("hardest", {"limit": 0}, "0 examples were requested; ask for 1 to 1000"),
        ("newly_wrong", {}, "no version to compare with"),
        ("newly_wrong", {"baseline_step": 1}, "compared with itself"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    harness: Harness, kind: str, options: dict[str, Any], sentence: str
) -> None:
    harness.record(1, content([True] * EXAMPLES))
    with pytest.raises(InvalidInputError, match=sentence):
        harness.examples(kind, 1, **options)


def test_damaged_tables_are_named(harness: Harness) -> None:
    file = harness.tables.path(harness.record(1, content()))
    for damage in ("{", "[]"):
        file.write_text(damage)
        with pytest.raises(LedgerError, match="entry 1 cannot be read"):
            harness.queries.tables(1, "test")


def test_numbers_that_json_lacks_are_text(harness: Harness) -> None:
    sequence = harness.record(1, {**content(), "loss": [float("nan"), float("-inf")]})
    found = harness.tables.read(sequence)
    assert found is not None
    assert found["loss"] == ["nan", "-inf"]


def test_tables_are_removed_with_their_entries(tmp_path: Path) -> None:
    harness = Harness(tmp_path, keep=2)
    for step in range(1, 6):
        harness.record(step, content())
    harness.recorder.remove_old(protected=lambda: [1])
    kept = {record.sequence for record in harness.ledger.page(after_sequence=0, limit=10)}
    assert 1 in kept
    assert len(kept) < 5
    assert {int(file.stem) for file in (tmp_path / "tables").iterdir()} == kept
    harness.recorder.close()
    harness.ledger.close()


def test_examples_have_the_key_and_the_features_that_the_dataset_gives_them(harness: Harness) -> None:
    arrays: dict[str, Any] = {
        "x": np.arange(EXAMPLES, dtype=np.float32)[:, np.newaxis],
        "y": np.arange(EXAMPLES) % 2,
        "key": np.array([f"scan-{place}" for place in range(EXAMPLES)]),
        "age": np.where(np.arange(EXAMPLES) == 3, np.nan, 40.0),
        "ward": np.arange(EXAMPLES)[:, np.newaxis],
    }
    dataset = harness.datasets["test"] = ArrayDataset("test", arrays, features=["age", "ward"])
    harness.record(1, content(np.ones(EXAMPLES, bool)), dataset)
    harness.record(2, content(~np.isin(np.arange(EXAMPLES), [3, 7])), dataset)
    found = harness.examples("newly_wrong", 2, baseline_step=1)
    assert list(found.indices) == [3, 7]
    assert list(found.described) == [
        {"key": "scan-3", "features": {"age": "nan", "ward": 3}},
        {"key": "scan-7", "features": {"age": 40.0, "ward": 7}},
    ]
    harness.sliced = ("x", "age", "ward")
    described = harness.examples("newly_wrong", 2, baseline_step=1).described
    assert [one["features"]["x"] for one in described] == [3.0, 7.0]
