"""Labels and sample weights with which a score says less than it seems to."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.evaluator.evaluation.class_decisions import LabelNotes
from understudy.evaluator.model.inputs import ALL_WEIGHTS
from understudy.evaluator.model.output_tasks import OutputTask

TASKS = {
    "odds": OutputTask(kind="binary", scores="probabilities", loss="binary_crossentropy"),
    "side": OutputTask(kind="binary", loss="hinge"),
    "value": OutputTask(kind="regression", loss="mse"),
}


def notes_of(
    *batches: dict[str, list[float]],
    weights: tuple[float, ...] | dict[str, list[float]] = (),
    masks: dict[str, list[bool]] | None = None,
) -> tuple[str, ...]:
    """Return the notes about some batches, restored from a file between any two of them."""
    found = LabelNotes(TASKS)
    by_name = weights if isinstance(weights, dict) else {ALL_WEIGHTS: weights} if weights else {}
    for targets in batches:
        found.add(*({name: np.array(of) for name, of in part.items()} for part in (targets, by_name, masks or {})))
        stored, found = found.stored(), LabelNotes(TASKS)
        found.restore(stored)
    return found.notes()


def test_nothing_is_noted_about_labels_of_both_classes() -> None:
    assert notes_of({"odds": [1, 1], "side": [-1, 1], "value": [7, 7]}, {"odds": [0, 0], "side": [1, 1]}) == ()
    assert notes_of({"odds": [0.2, 0.9]}, weights=(0, 0.5)) == ()


def test_labels_of_one_class_only_are_noted() -> None:
    (note,) = notes_of({"odds": [1, 1]}, {"odds": [1]})
    assert note == "all labels of 'odds' are 1, so AUC, precision and recall say nothing"


@pytest.mark.parametrize(("labels", "limits"), [([0, 7], "0 to 7"), ([-1, 1], "-1 to 1")])
def test_labels_that_a_loss_of_probabilities_does_not_take_are_noted(labels: list[float], limits: str) -> None:
    (note,) = notes_of({"odds": labels})
    assert note == f"labels of 'odds' are from {limits}; its loss is for labels from 0 to 1"


def test_labels_that_are_no_numbers_hide_nothing() -> None:
    assert notes_of({"odds": [np.nan, 0]}, {"odds": [1, 1]}) == ()
    assert notes_of({"odds": [np.nan, np.nan]}) == ()


def test_weights_that_are_all_zero_are_noted() -> None:
    (note,) = notes_of({"value": [1, 2]}, {"value": [3, 4]}, weights=(0, 0))
    assert note == "the examples have no weight: all sample weights are 0, so the loss says nothing"


def test_an_output_whose_weights_are_all_zero_is_noted() -> None:
    (note,) = notes_of({"value": [1, 2]}, weights={"value": [0, 0], "odds": [0, 1]})
    assert note == "'value' has no weight: all its sample weights are 0, so its loss is 0"
    assert notes_of({"value": [1, 2]}, weights={"value": [0, 0]}) == (note,)


def test_an_output_that_is_masked_everywhere_is_noted() -> None:
    (note,) = notes_of({"value": [1, 2]}, masks={"value": [False, False]})
    assert note == "'value' has no weight: all its elements are masked, so its loss is 0"
    assert notes_of({"value": [1, 2]}, masks={"value": [False, True]}) == ()
