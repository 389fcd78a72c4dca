"""Slices and flips against the figures that TensorFlow Model Analysis publishes in its own tests.

Source: https://github.com/tensorflow/model-analysis, `tensorflow_model_analysis/metrics/`: the examples and the
expected values of `confusion_matrix_metrics_test.py` (without weights, with weights, and of the top 2) and of
`flip_metrics_test.py`. TFMA itself needs Keras 2, so it cannot run beside this code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, metrics

from testkit import exactness
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.class_decisions import decide
from understudy.evaluator.evaluation.example_outcomes import flips
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import OutputTask

LABELS = np.array([1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0], np.float32)
PREDICTIONS = np.array([0.6, 0.3, 0.2, 0.6, 0.7, 0.8, 0.1, 0.2, 0.3, 0.4, 1.0, 0.7, 0.5], np.float32)
WEIGHTS = np.array([1] * 10 + [0.5, 0.7, 0.9], np.float32)
GROUPS = np.array(["unweighted"] * 10 + ["weighted"] * 3)

PUBLISHED = {
    "group=unweighted": {
        "auc": 0.26,
        "auc_precision_recall": 0.36205,
        "specificity_at_sensitivity": 0.2,
        "sensitivity_at_specificity": 0.0,
        "precision_at_recall": 0.5,
        "recall_at_precision": 1.0,
        "tp": 1.0,
        "fp": 3.0,
        "tn": 2.0,
        "fn": 4.0,
        "accuracy": 0.3,
        "precision": 1 / 4,
        "recall": 1 / 5,
    },
    "group=weighted": {
        "auc": 0.64286,
        "auc_precision_recall": 0.37467,
        "specificity_at_sensitivity": 0.642857,
        "sensitivity_at_specificity": 1.0,
        "precision_at_recall": 0.58333,
        "recall_at_precision": 1.0,
        "tp": 0.7,
        "fp": 0.5,
        "tn": 0.9,
        "fn": 0.0,
        "accuracy": 1.6 / 2.1,
        "precision": 0.7 / 1.2,
        "recall": 1.0,
    },
}


def passing_through(width: int, weighted: list[Any]) -> Any:
    inputs = keras.Input((width,))
    model = keras.Model(inputs, layers.Identity()(inputs))
    model.compile("sgd", "mse", weighted_metrics=weighted)
    return model


def slices(slot: Slot, arrays: tuple[Any, ...], groups: Any, *, size: int) -> dict[str, dict[str, float]]:
    starts = range(0, len(groups), size)
    batches = [tuple(array[start : start + size] for array in arrays) for start in starts]
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]))
    found = exactness.score_parts(slot, batches, [groups[start : start + size] for start in starts], options)
    return {part.name: dict(part.metrics) for part in found.slices}


@pytest.fixture(scope="module")
def areas_and_confusions(make_slot: Callable[..., Slot]) -> Slot:
    """A slot whose model passes its input through, scored by the published metrics."""
    return make_slot(
        passing_through(
            1,
            [
                metrics.AUC(name="auc"),
                metrics.AUC(name="auc_precision_recall", curve="PR"),
                metrics.SpecificityAtSensitivity(0.5, name="specificity_at_sensitivity"),
                metrics.SensitivityAtSpecificity(0.5, name="sensitivity_at_specificity"),
                metrics.PrecisionAtRecall(0.5, name="precision_at_recall"),
                metrics.RecallAtPrecision(0.5, name="recall_at_precision"),
                metrics.TruePositives(name="tp"),
                metrics.FalsePositives(name="fp"),
                metrics.TrueNegatives(name="tn"),
                metrics.FalseNegatives(name="fn"),
                metrics.BinaryAccuracy(name="accuracy"),
                metrics.Precision(name="precision"),
                metrics.Recall(name="recall"),
            ],
        )
    )


@pytest.mark.parametrize("size", [4, 13])
def test_slices_have_the_published_confusions_and_areas(areas_and_confusions: Slot, size: int) -> None:
    arrays = (PREDICTIONS[:, np.newaxis], LABELS[:, np.newaxis], WEIGHTS)
    found = slices(areas_and_confusions, arrays, GROUPS, size=size)
    assert found.keys() == PUBLISHED.keys()
    for name, expected in PUBLISHED.items():
        values = {metric: found[name][metric] for metric in expected}
        assert values == pytest.approx(expected, abs=1e-4), name


def test_the_top_two_have_the_published_precision_and_recall(make_slot: Callable[..., Slot]) -> None:
    predictions = np.array(
        [
            [0.1, 0.2, 0.1, 0.25, 0.35],
            [0.2, 0.3, 0.05, 0.15, 0.3],
            [0.01, 0.2, 0.09, 0.5, 0.2],
            [0.3, 0.2, 0.05, 0.4, 0.05],
        ],
        np.float32,
    )
    labels = np.eye(5, dtype=np.float32)[[2, 1, 3, 1]]
    weights = np.array([0.5, 0.7, 0.9, 0.3], np.float32)
    of_top = [metrics.Precision(top_k=2, name="precision"), metrics.Recall(top_k=2, name="recall")]
    twice = tuple(np.repeat(array, 2, axis=0) for array in (predictions, labels, weights))
    groups = np.array(["published", "other"] * 4)
    twice[1][1::2] = np.eye(5)[0]
    found = slices(make_slot(passing_through(5, of_top)), twice, groups, size=3)["group=published"]
    assert found["precision"] == pytest.approx(1.6 / (1.6 + 3.2), abs=1e-5)
    assert found["recall"] == pytest.approx(1.6 / (1.6 + 0.8), abs=1e-5)


def test_flips_have_the_published_rates() -> None:
    task = OutputTask(kind="binary", scores="probabilities")
    labels, weights = np.array([[0.0], [0.0], [1.0], [1.0]]), np.array([1.0, 2.0, 3.0, 4.0])
    baseline, candidate = (
        decide(task, np.array(outputs)[:, np.newaxis], labels).right
        for outputs in ([0.1, 0.9, 0.1, 0.9], [0.9, 0.1, 0.2, 0.8])
    )
    found = flips(candidate, baseline)
    share = [weights[changed].sum() / weights.sum() for changed in (found.newly_wrong, found.newly_right)]
    assert share == pytest.approx([1 / 10, 2 / 10])  # both changes are among the negatives
    assert sum(share) == pytest.approx(3 / 10)
