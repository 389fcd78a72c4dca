"""A mistake in the code of an experiment's data becomes a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from understudy.experiments import ExperimentError
from understudy.experiments.digits import Digits
from understudy.experiments.experiment_data import evaluation_data, slices_of, training_data

BY_NAME = "expected a dictionary of datasets by name, such as {'test': dataset}"
SINGLE = "expected a tf.data.Dataset of single examples (x, y)"


class Giving(Digits):
    """Gives what a function returns as its data."""

    def __init__(self, give: Callable[[], Any]) -> None:
        self._give = give

    def training_data(self) -> Any:
        return self._give()

    def evaluation_data(self) -> Any:
        return self._give()


def dataset() -> Any:
    return tf.data.Dataset.range(3)


def parsed() -> Any:
    return np.loadtxt(["no number"])


@pytest.mark.parametrize(
    ("give", "sentence"),
    [
        (lambda: None, f"evaluation_data() is of the type NoneType; {BY_NAME}"),
        (dataset, f"evaluation_data() is of the type _RangeDataset; {BY_NAME}"),
        (lambda: {"test": (dataset(),)}, f"evaluation_data()['test'] is of the type tuple; {SINGLE}"),
        (lambda: {7: dataset()}, f"evaluation_data() with the name 7, is of the type int; {BY_NAME}"),
    ],
)
def test_what_is_no_dataset_by_name_is_refused(give: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ExperimentError, match=f"^digits: {re.escape(sentence)}$"):
        evaluation_data(Giving(give))


@pytest.mark.parametrize("given", [None, {"train": np.ones(3)}, (np.ones(3), np.ones(3))])
def test_what_is_no_training_data_is_refused(given: Any) -> None:
    sentence = f"digits: training_data() is of the type {type(given).__name__}; {SINGLE}"
    with pytest.raises(ExperimentError, match=f"^{re.escape(sentence)}$"):
        training_data(Giving(lambda: given))


@pytest.mark.parametrize("read", [training_data, evaluation_data])
def test_what_the_users_code_raises_is_told_with_its_line_and_not_that_of_a_library(
    read: Callable[[Giving], object],
) -> None:
    line = parsed.__code__.co_firstlineno + 1
    place = re.escape(f"({__file__}, line {line})")
    with pytest.raises(
        ExperimentError, match=rf"^digits: {read.__name__}\(\) raised ValueError: could not convert .* {place}$"
    ):
        read(Giving(parsed))


@pytest.mark.parametrize("given", ["label", [1], 7])
def test_slices_that_are_no_texts_are_refused(given: Any) -> None:
    experiment = Digits()
    experiment.slices = given  # type: ignore[attr-defined]
    sentence = f"digits: slices is {given!r}; expected a sequence of texts, such as ['label']"
    with pytest.raises(ExperimentError, match=f"^{re.escape(sentence)}$"):
        slices_of(experiment)


def test_slices_are_optional() -> None:
    experiment = Digits()
    assert slices_of(experiment) == ()
    experiment.slices = None  # type: ignore[attr-defined]
    assert slices_of(experiment) == ()
    experiment.slices = ["label", "age:18"]  # type: ignore[attr-defined]
    assert slices_of(experiment) == ("label", "age:18")


def test_datasets_by_name_are_returned_in_their_order() -> None:
    only = dataset()
    datasets = {"b": only, "a": only}
    assert list(evaluation_data(Giving(lambda: datasets))) == ["b", "a"]
    assert training_data(Giving(lambda: only)) is only
