"""How two versions' answers to the same inputs differ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from understudy.evaluator.evaluation.answer_differences import AnswerDifference, compare_answers, flips
from understudy.evaluator.types import Array, OutputTask

SPARSE = OutputTask(kind="sparse", scores="probabilities")
BINARY = OutputTask(kind="binary", scores="probabilities")
LOGITS = OutputTask(kind="multilabel", scores="logits")
REGRESSION = OutputTask(kind="regression")
UNKNOWN = OutputTask(kind="unknown")


def floats(*rows: object) -> Array:
    return np.array(rows, np.float32)


def differ(task: OutputTask, now: Array, before: Array, tolerance: float = 0.01) -> AnswerDifference:
    return compare_answers({"y": task}, {"y": now}, {"y": before}, tolerance=tolerance)


@pytest.mark.parametrize("task", [SPARSE, UNKNOWN])
def test_a_classifier_differs_where_the_class_does_however_far_the_numbers_are(task: OutputTask) -> None:
    found = differ(task, floats([0.6, 0.4], [0.9, 0.1]), floats([0.4, 0.6], [0.51, 0.49]))
    assert found == AnswerDifference(share=0.5, largest=0.0, is_finite=True)


def test_labels_differ_where_they_pass_their_threshold() -> None:
    assert differ(BINARY, floats([0.6], [0.1]), floats([0.4], [0.49])).share == 0.5
    assert differ(LOGITS, floats([0.2, -3.0], [1.0, 1.0]), floats([-0.2, -1.0], [2.0, 0.1])).share == 0.5


def test_several_labels_flip_where_one_passes_its_threshold_and_numbers_never() -> None:
    labels = OutputTask(kind="multilabel", scores="probabilities")
    before = floats([0.9, 0.8, 0.1], [0.9, 0.8, 0.1], [0.2, 0.1, 0.3])
    now = floats([0.8, 0.9, 0.1], [0.9, 0.4, 0.1], [0.3, 0.4, 0.1])  # the largest is another in the first and last
    assert flips_of(labels, now, before) == [False, True, False]
    assert flips_of(SPARSE, now, before) == [True, False, True]
    assert flips(REGRESSION, now, before) is None
    assert flips_of(BINARY, floats([0.6]), floats([0.4])) == [True]


@pytest.mark.parametrize("task", [UNKNOWN, None])
def test_where_neither_loss_nor_metrics_tell_it_the_values_say_whether_an_output_has_labels(
    task: OutputTask | None,
) -> None:
    confident, unsure = floats([0.999, 0.0, 0.001]), floats([0.9, 0.8, 0.1])
    assert flips_of(task, unsure, confident) == [True]  # the confident answer alone could be one of classes
    assert flips_of(task, confident, unsure) == [True]
    assert flips_of(task, floats([0.8, 0.9, 0.1]), unsure) == [False]
    assert flips_of(task, floats([0.35, 0.4, 0.25]), floats([0.4, 0.35, 0.25])) == [True]  # they add up to 1
    assert flips_of(task, floats([2.0, 3.0]), floats([3.0, 2.0])) == [True]  # no probabilities
    missing = floats([np.nan, 0.2, 0.1], [0.8, 0.9, 0.1])
    assert flips_of(task, missing, missing[:, ::-1]) == [False, True]


def flips_of(task: OutputTask | None, now: Array, before: Array) -> list[bool]:
    found = flips(task, now, before)
    assert found is not None
    flipped: list[bool] = found.tolist()
    return flipped


def test_other_numbers_differ_beyond_the_tolerance_of_the_largest_one() -> None:
    found = differ(REGRESSION, floats([1.0], [100.9], [-100.0]), floats([2.0], [100.0], [-97.0]))
    assert found.share == pytest.approx(1 / 3)
    assert found.largest == pytest.approx(0.03)
    assert differ(REGRESSION, floats([1.0], [0.0]), floats([0.0], [0.0])).largest == math.inf
    assert differ(REGRESSION, floats([0.0]), floats([0.0])).share == 0.0


def test_numbers_that_are_not_finite_are_told_unless_the_other_answer_has_them_too() -> None:
    nan = np.nan
    assert differ(REGRESSION, floats([nan]), floats([1.0])) == AnswerDifference(1.0, math.inf, is_finite=False)
    assert differ(REGRESSION, floats([nan]), floats([nan])) == AnswerDifference(0.0, 0.0, is_finite=True)
    assert not differ(SPARSE, floats([nan, 0.1]), floats([0.2, 0.8])).is_finite


def test_answers_of_other_names_shapes_or_kinds_differ_as_a_whole() -> None:
    assert differ(REGRESSION, floats([1.0, 2.0]), floats([1.0])).share == 1.0
    assert differ(REGRESSION, np.array([[1]]), floats([1.0])).share == 1.0
    assert compare_answers({}, {"z": floats([1.0])}, {"y": floats([1.0])}, tolerance=0.1).share == 1.0


def test_strings_and_integers_differ_where_they_are_not_equal() -> None:
    text = np.array([[b"a"], [b"b"]], object)
    assert differ(UNKNOWN, text, np.array([[b"a"], [b"c"]], object)).share == 0.5
    assert differ(UNKNOWN, np.array([[1], [2]]), np.array([[1], [2]])).share == 0.0


def test_an_example_differs_once_whatever_the_number_of_its_outputs_and_places() -> None:
    before = {"a": floats([1.0], [1.0]), "b": floats([[0.1, 0.9], [0.8, 0.2]], [[0.1, 0.9], [0.8, 0.2]])}
    now = {"a": floats([2.0], [1.0]), "b": before["b"].copy()}
    now["b"][0, :] = now["b"][0, :, ::-1]
    assert compare_answers({"a": REGRESSION, "b": SPARSE}, now, before, tolerance=0.1).share == 0.5
