"""Which class a model predicts for an example."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.evaluator.evaluation.class_decisions import decisions_as_targets, predicted_classes
from understudy.evaluator.types import OutputTask, ScoreKind, TaskKind

SCORES = np.array([[-0.2], [0.3], [0.7]], np.float32)


@pytest.mark.parametrize(
    ("kind", "scores", "expected"),
    [
        ("binary", "probabilities", [0, 0, 1]),
        ("binary", "logits", [0, 1, 1]),
        ("binary", "unknown", [0, 1, 1]),
        ("unknown", "unknown", [0, 0, 1]),
    ],
)
def test_one_score_decides_between_two_classes_as_in_the_tables(
    kind: TaskKind, scores: ScoreKind, expected: list[int]
) -> None:
    task = OutputTask(kind=kind, scores=scores)
    for outputs in (SCORES, SCORES[:, 0]):
        found = predicted_classes(task, outputs)
        assert found is not None
        assert found.tolist() == expected


def test_the_largest_of_several_scores_is_the_class() -> None:
    found = predicted_classes(OutputTask(kind="sparse"), np.array([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1]]))
    assert found is not None
    assert found.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("binary", (2, 6, 1)),
        ("binary", (2, 6)),
        ("sparse", (2, 6, 3)),
        ("multilabel", (2, 3)),
        ("regression", (2, 1)),
    ],
)
def test_an_example_of_which_several_things_are_decided_or_none_has_no_class(
    kind: TaskKind, shape: tuple[int, ...]
) -> None:
    assert predicted_classes(OutputTask(kind=kind, scores="probabilities"), np.zeros(shape)) is None


def test_decisions_are_targets_of_the_kind_that_the_loss_takes() -> None:
    tasks = {
        "class": OutputTask(kind="sparse", scores="probabilities"),
        "odds": OutputTask(kind="binary", scores="probabilities"),
        "tags": OutputTask(kind="multilabel", scores="logits"),
        "numbers": OutputTask(kind="regression"),
    }
    tags = np.array([[-1.0, 2.0, 3.0]], np.float32)
    outputs = {
        "class": np.array([[0.1, 0.9]], np.float32),
        "odds": np.array([[0.6]], np.float32),
        "tags": tags,
        "numbers": tags,
        "unknown tags": np.array([[0.75, 0.5, 0.875]], np.float32),
        "unknown": np.array([[0.6]], np.float32),
    }

    found = {name: values.tolist() for name, values in decisions_as_targets(tasks, outputs).items()}

    decided = {"class": [1], "odds": [[1]], "tags": [[0, 1, 1]], "unknown tags": [[1, 0, 1]]}
    assert found == {**decided, "numbers": tags.tolist(), "unknown": outputs["unknown"].tolist()}
