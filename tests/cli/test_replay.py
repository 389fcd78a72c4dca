"""How `understudy replay` compares answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from understudy.cli.replay import OutputDifference, RateLimit, _batches
from understudy.evaluator.datasets.request_records import LoggedExample
from understudy.evaluator.types import OutputTask

SCORES = np.array([[0.1, 0.9], [0.8, 0.2], [0.6, 0.4]], np.float32)


def difference(now: Any, before: Any, tolerance: float = 1e-6, task: OutputTask | None = None) -> OutputDifference:
    found = OutputDifference()
    found.add(np.asarray(now), np.asarray(before), tolerance, task)
    found.finish(len(now))
    return found


def test_the_same_answers_do_not_differ() -> None:
    found = difference(SCORES, SCORES)
    assert (found.differing_examples, found.largest_difference, found.class_flips) == (0, 0.0, 0)


def test_flips_and_differences_are_counted_by_example() -> None:
    found = difference(SCORES, np.array([[0.1, 0.9], [0.3, 0.7], [0.5, 0.5]], np.float32))
    assert found.differing_examples == 2
    assert found.differing_share == pytest.approx(2 / 3)
    assert found.largest_difference == pytest.approx(0.5)
    assert found.class_flips == 1
    assert found.class_flip_share == pytest.approx(1 / 3)


def test_what_is_within_the_tolerance_does_not_differ() -> None:
    assert difference(SCORES + 0.01, SCORES, tolerance=0.02).differing_examples == 0
    assert difference(SCORES + 0.01, SCORES, tolerance=1e-4).differing_examples == 3


def test_nan_differs_from_a_number_only() -> None:
    assert difference([[np.nan]], [[np.nan]]).differing_examples == 0
    assert difference([[np.nan]], [[1.0]]).differing_examples == 1


def test_single_values_and_strings_have_no_classes() -> None:
    assert difference([[0.1], [0.2]], [[0.9], [0.2]]).class_flips is None
    found = difference(np.array([b"a", b"b"], object), np.array([b"a", b"c"], object))
    assert (found.differing_examples, found.largest_difference, found.class_flips) == (1, None, None)


def test_labels_flip_at_their_threshold_and_a_regression_has_no_flips() -> None:
    now, before = np.array([[0.9, 0.8], [0.9, 0.4]]), np.array([[0.8, 0.9], [0.9, 0.8]])
    assert difference(now, before, task=OutputTask(kind="multilabel", scores="probabilities")).class_flips == 1
    assert difference(now, before, task=OutputTask(kind="regression")).class_flips is None


def test_other_shapes_differ_in_every_example() -> None:
    assert difference(SCORES, SCORES[:, :1]).differing_examples == 3


def test_batches_add_up() -> None:
    found = OutputDifference()
    for row in range(3):
        found.add(SCORES[row : row + 1], SCORES[::-1][row : row + 1], 1e-6)
    found.finish(3)
    assert found == difference(SCORES, SCORES[::-1])


def test_large_examples_are_sent_a_few_at_a_time() -> None:
    logged = LoggedExample(
        inputs={"x": np.zeros(3 << 18, np.float32)},
        answers={},
        step=1,
        recorded_at=0.0,
        method="Predict",
        caller="",
    )
    assert [len(batch) for batch in _batches(iter([logged] * 5), 32)] == [2, 2, 1]


def test_requests_are_sent_at_most_at_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [100.0], []
    monkeypatch.setattr("understudy.cli.replay.time.monotonic", lambda: now[0])
    monkeypatch.setattr("understudy.cli.replay.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    limit = RateLimit(10.0)
    for index in range(6):
        limit.wait()
        sent.append(now[0])
        now[0] += 0.5 if index == 2 else 0.01  # one answer is slow, and is not made up for
    assert np.diff(sent) == pytest.approx([0.1, 0.1, 0.5, 0.1, 0.1])
