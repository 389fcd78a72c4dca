"""Labels that the loss of an output is not for."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.evaluator.evaluation.class_decisions import LabelNotes
from understudy.evaluator.types import OutputTask

TASKS = {
    "odds": OutputTask(kind="binary", scores="probabilities", loss="binary_crossentropy"),
    "side": OutputTask(kind="binary", loss="hinge"),
    "value": OutputTask(kind="regression", loss="mse"),
}


def notes_of(*batches: dict[str, list[float]]) -> tuple[str, ...]:
    """Return the notes about some batches, restored from a file between any two of them."""
    found = LabelNotes(TASKS)
    for targets in batches:
        found.add({name: np.array(of) for name, of in targets.items()})
        stored, found = found.stored(), LabelNotes(TASKS)
        found.restore(stored)
    return found.notes()


def test_nothing_is_noted_about_labels_that_a_loss_takes() -> None:
    assert notes_of({"odds": [1, 1], "side": [-1, 1], "value": [7, 7]}, {"odds": [0, 0], "side": [1, 1]}) == ()


def test_labels_between_0_and_1_are_counted_as_most_metrics_are_not_for_them() -> None:
    told = "between 0 and 1; accuracy, precision, recall and AUC are for labels of 0 and 1"
    assert notes_of({"odds": [0.2, 1]}, {"odds": [0.9, 0.1]}) == (f"3 labels of 'odds' are {told}",)
    assert notes_of({"odds": [0.2, 1], "value": [0.5, 0.5]}) == (f"1 label of 'odds' is {told}",)


@pytest.mark.parametrize(("labels", "limits"), [([0, 7], "0 to 7"), ([-1, 1], "-1 to 1")])
def test_labels_that_a_loss_of_probabilities_does_not_take_are_noted(labels: list[float], limits: str) -> None:
    (note,) = notes_of({"odds": labels})
    assert note == f"labels of 'odds' are from {limits}; its loss is for labels from 0 to 1"


def test_targets_that_are_no_numbers_are_counted_and_hide_nothing() -> None:
    assert notes_of({"odds": [np.nan, 0]}, {"odds": [1, 1]}) == ("1 value of the targets of 'odds' is not a number",)
    assert notes_of({"odds": [np.nan, np.nan]}) == ("2 values of the targets of 'odds' are not numbers",)
    assert notes_of({"value": [np.nan, 3]}, {"value": [np.nan, 4]}) == (
        "2 values of the targets of 'value' are not numbers",
    )
    assert notes_of({"odds": [np.nan, 7]}, {"odds": [1, np.nan]}) == (
        "labels of 'odds' are from 1 to 7; its loss is for labels from 0 to 1",
        "2 values of the targets of 'odds' are not numbers",
    )
