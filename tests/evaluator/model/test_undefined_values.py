"""Metrics that Keras gives a number for although they are undefined on what they counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, metrics

from testkit import exactness
from understudy.evaluator.evaluation.bootstrap import draw
from understudy.evaluator.evaluation.breakdown import SEED, BreakdownOptions
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.model import undefined_values
from understudy.evaluator.model.scorer import ScoreState
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.model.undefined_values import UndefinedValues

MakeSlot = Callable[..., Slot]

BOTH, POSITIVE, NEGATIVE = [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]
WEIGHTLESS = [0, 0, 0, 0]


def reasons(metric: Any, labels: Any, scores: Any, weights: Any = None) -> dict[str, str]:
    """Return why the values of a metric of some examples are undefined."""
    metric.update_state(np.array(labels, "f4"), np.array(scores, "f4"), sample_weight=weights)
    found = UndefinedValues([("m", metric)], metric.variables).find([value.numpy()[None] for value in metric.variables])
    return {name: each.reason() for name, each in found.items()}


CURVES = [
    metrics.AUC,
    lambda: metrics.SensitivityAtSpecificity(0.5),
    lambda: metrics.SpecificityAtSensitivity(0.5),
]


@pytest.mark.parametrize("make", CURVES)
@pytest.mark.parametrize(
    ("labels", "weights", "reason"),
    [
        (BOTH, None, ""),
        (POSITIVE, None, undefined_values.NO_NEGATIVE),
        (NEGATIVE, None, undefined_values.NO_POSITIVE),
        (BOTH, [1, 0, 0, 1], undefined_values.NO_POSITIVE),
        (BOTH, WEIGHTLESS, undefined_values.NO_LABEL),
    ],
)
def test_a_curve_is_undefined_without_labels_of_both_classes(
    make: Callable[[], Any], labels: list[int], weights: list[int] | None, reason: str
) -> None:
    assert reasons(make(), labels, [0.1, 0.9, 0.6, 0.4], weights) == ({"m": reason} if reason else {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: metrics.AUC(curve="PR"),
        lambda: metrics.PrecisionAtRecall(0.5),
        lambda: metrics.RecallAtPrecision(0.5),
    ],
)
def test_a_curve_of_precision_and_recall_is_undefined_without_positive_labels_alone(make: Callable[[], Any]) -> None:
    assert reasons(make(), POSITIVE, [0.1, 0.9, 0.6, 0.4]) == {}
    assert reasons(make(), NEGATIVE, [0.1, 0.9, 0.6, 0.4]) == {"m": undefined_values.NO_POSITIVE}


def test_a_mean_of_curves_says_that_one_of_its_labels_is_the_same_in_all_examples() -> None:
    scores = [[0.1, 0.9], [0.6, 0.4]]
    for labels, reason in (
        ([[0, 1], [1, 1]], undefined_values.NO_NEGATIVE_OF_ONE),
        ([[0, 0], [1, 0]], undefined_values.NO_POSITIVE_OF_ONE),
    ):
        assert reasons(metrics.AUC(multi_label=True, num_labels=2), labels, scores) == {"m": reason}
    assert reasons(metrics.AUC(multi_label=True, num_labels=2), [[0, 1], [1, 0]], scores) == {}


def test_precision_is_undefined_without_positive_predictions_and_recall_without_positive_labels() -> None:
    low, high = [0.1] * 4, [0.9] * 4
    assert reasons(metrics.Precision(), POSITIVE, low) == {"m": undefined_values.NO_PREDICTION}
    assert reasons(metrics.Precision(), NEGATIVE, high) == {}
    assert reasons(metrics.Recall(), NEGATIVE, high) == {"m": undefined_values.NO_POSITIVE}
    assert reasons(metrics.Recall(), POSITIVE, low) == {}
    several = metrics.Precision(thresholds=[0.3, 0.5, 0.8])
    assert reasons(several, BOTH, [0.6] * 4) == {"m/2": undefined_values.NO_PREDICTION}


def test_an_f_score_is_undefined_for_the_classes_without_positive_labels() -> None:
    labels, scores = [[1, 0], [1, 0]], [[0.9, 0.1], [0.2, 0.8]]
    assert reasons(metrics.F1Score(threshold=0.5), labels, scores) == {"m/1": undefined_values.NO_POSITIVE}
    assert reasons(metrics.F1Score("macro", threshold=0.5), labels, scores) == {}
    absent = [[0.9, 0.1], [0.2, 0.3]]
    assert reasons(metrics.F1Score("macro", threshold=0.5), labels, absent) == {"m": undefined_values.NO_CLASS_OF_MEAN}
    for average in ("micro", "weighted"):
        assert reasons(metrics.F1Score(average, threshold=0.5), labels, absent) == {}
    nothing = [[0, 0], [0, 0]]
    assert reasons(metrics.F1Score("macro", threshold=0.5), nothing, scores) == {"m": undefined_values.NO_POSITIVE}


@pytest.mark.parametrize("make", [metrics.MeanAbsoluteError, metrics.RootMeanSquaredError])
def test_a_mean_is_undefined_where_nothing_weighs(make: Callable[[], Any]) -> None:
    assert reasons(make(), [[1], [2]], [[1], [2]], [0, 0]) == {"m": undefined_values.NO_MEAN}
    assert reasons(make(), [[1], [2]], [[1], [2]], [0, 1]) == {}, "0 is its value"


def test_r2_is_undefined_where_all_targets_are_the_same() -> None:
    assert reasons(metrics.R2Score(), [[7.1], [7.1], [7.1]], [[1], [2], [3]]) == {"m": undefined_values.SAME_TARGETS}
    assert reasons(metrics.R2Score(), [[7], [7], [8]], [[1], [2], [3]]) == {}
    one_of_two = [[1, 5], [2, 5]]
    assert reasons(metrics.R2Score(), one_of_two, one_of_two) == {"m": undefined_values.SAME_TARGETS}
    assert reasons(metrics.R2Score(None), one_of_two, one_of_two) == {"m/1": undefined_values.SAME_TARGETS}
    assert reasons(metrics.R2Score("variance_weighted_average"), one_of_two, one_of_two) == {}


def test_a_correlation_is_undefined_where_there_is_one_value_or_all_are_the_same() -> None:
    correlation = metrics.PearsonCorrelation
    assert reasons(correlation(), [[1], [2]], [[1], [3]]) == {"m": undefined_values.SAME_ON_AXIS}
    assert reasons(correlation(), [[1, 2], [4, 4]], [[1, 2], [1, 2]]) == {"m": undefined_values.SAME_ON_AXIS}
    assert reasons(correlation(axis=0), [[1], [2]], [[3], [3]]) == {"m": undefined_values.SAME_ON_AXIS}
    assert reasons(correlation(axis=0), [[1], [2]], [[1], [3]]) == {}
    assert reasons(correlation(axis=0), [[1], [2]], [[1], [3]], [0]) == {"m": undefined_values.NO_MEAN}


def test_a_mean_of_logarithms_is_undefined_where_an_output_is_negative() -> None:
    assert reasons(metrics.Poisson(), [[1], [2]], [[1], [-1]]) == {"m": undefined_values.NEGATIVE_OUTPUT}


def correlated() -> Any:
    """Return a model that passes two values through, with a correlation of each example."""
    inputs = keras.Input((2,), name="x")
    model = keras.Model(inputs, layers.Activation("linear", name="y")(inputs))
    model.compile("sgd", "mse", metrics=[metrics.PearsonCorrelation(name="r")])
    return model


def test_a_correlation_is_not_called_undefined_where_outputs_are_not_numbers(make_slot: MakeSlot) -> None:
    slot = make_slot(correlated())
    scorer, targets = slot.scorer(), np.array([[1, 2]], "f4")
    same = scorer.update(scorer.start(), exactness.as_batch(slot, np.array([[3, 3]], "f4"), targets))
    assert scorer.undefined(same) == {"r": undefined_values.SAME_ON_AXIS}
    broken = scorer.update(scorer.start(), exactness.as_batch(slot, np.array([[3, np.nan]], "f4"), targets))
    assert scorer.undefined(broken) == {}
    assert np.isnan(scorer.result(broken)["r"])


def test_a_correlation_is_undefined_in_the_slices_with_examples_of_one_value(make_slot: MakeSlot) -> None:
    outputs, targets = np.array([[1, 2], [3, 3], [4, 1]], "f4"), np.array([[1, 2], [1, 2], [1, 3]], "f4")
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=40)
    slot = make_slot(correlated())
    without, with_one = exactness.score_parts(slot, [(outputs, targets)], [np.array([0, 1, 0])], options).slices
    assert (without.metrics["r"], without.undefined) == (0.0, {})
    assert with_one.undefined == {"r": undefined_values.SAME_ON_AXIS}
    assert with_one.metrics.keys() == with_one.intervals.keys() == {"loss"}


def test_an_iou_is_undefined_where_none_of_its_classes_occurs() -> None:
    assert reasons(metrics.IoU(3, [2]), [0, 1], [0, 1]) == {"m": undefined_values.NO_CLASS}
    assert reasons(metrics.IoU(3, [2]), [0, 1], [0, 2]) == {}
    assert reasons(metrics.MeanIoU(3), [0, 1], [0, 1]) == {}


def test_a_metric_with_a_result_of_its_own_is_never_undefined() -> None:
    class Own(metrics.AUC):  # type: ignore[misc]
        def result(self) -> Any:
            return super().result()

    assert reasons(Own(), POSITIVE, [0.1, 0.9, 0.6, 0.4]) == {}
    assert reasons(metrics.FalsePositives(), NEGATIVE, [0.1] * 4) == {}, "a count of 0"


def scorer_of_odds() -> Any:
    """Return a model that passes scores through, with an AUC."""
    inputs = keras.Input((1,), name="x")
    model = keras.Model(inputs, layers.Activation("linear", name="y")(inputs))
    model.compile("sgd", "binary_crossentropy", weighted_metrics=[metrics.AUC(name="auc"), "mae"])
    return model


def column(*values: float) -> Any:
    return np.array(values, "f4")[:, None]


@pytest.mark.parametrize("second", [[1, 1], [0, 1]])
def test_a_score_says_what_is_undefined_also_after_a_restart(make_slot: MakeSlot, second: list[int]) -> None:
    slot = make_slot(scorer_of_odds())
    scorer = slot.scorer()
    state = scorer.update(scorer.start(), exactness.as_batch(slot, column(0.2, 0.8), column(1, 1)))
    assert scorer.undefined(state) == {"auc": undefined_values.NO_NEGATIVE}
    state = ScoreState.restored(state.stored())
    state = scorer.update(state, exactness.as_batch(slot, column(0.2, 0.8), column(*second)))
    assert scorer.undefined(state) == ({} if 0 in second else {"auc": undefined_values.NO_NEGATIVE})


def test_a_loss_is_undefined_as_long_as_no_example_weighs_anything(make_slot: MakeSlot) -> None:
    slot = make_slot(scorer_of_odds())
    scorer = slot.scorer()
    assert scorer.undefined(scorer.start()) == {}
    batch = exactness.as_batch(slot, column(0.2, 0.8), column(0, 1), np.zeros(2, np.float32))
    state = scorer.update(scorer.start(), batch)
    assert scorer.undefined(state) == {
        "loss": undefined_values.NO_LOSS,
        "auc": undefined_values.NO_LABEL,
        "mae": undefined_values.NO_MEAN,
    }
    state = ScoreState.restored(state.stored())
    batch = exactness.as_batch(slot, column(0.2, 0.8), column(0, 1), np.array([0, 1], np.float32))
    assert scorer.undefined(scorer.update(state, batch)) == {"auc": undefined_values.NO_NEGATIVE}


def masked_and_whole() -> Any:
    """Return a model with an output that has a mask, and one that has none."""
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    embedded = layers.Embedding(5, 2, mask_zero=True)(tokens)
    tags = layers.Dense(2, activation="softmax", name="tags")(embedded)
    length = layers.Dense(1, name="length")(layers.Flatten()(tokens))
    model = keras.Model(tokens, [tags, length])
    model.compile("sgd", ["sparse_categorical_crossentropy", "mse"], metrics=[["accuracy"], []])
    return model


def test_the_loss_of_an_output_is_undefined_where_all_of_it_is_masked(make_slot: MakeSlot) -> None:
    slot = make_slot(masked_and_whole())
    scorer = slot.scorer()
    batch = exactness.as_batch(slot, np.zeros((2, 3), "i4"), [np.zeros((2, 3), "i4"), column(1, 2)])
    undefined = scorer.undefined(scorer.update(scorer.start(), batch))
    assert undefined == {"tags_loss": undefined_values.NO_LOSS, "tags_accuracy": undefined_values.NO_MEAN}


@pytest.mark.parametrize("by_examples", [True, False])
def test_slices_and_resamples_leave_out_what_is_undefined_in_them(
    make_slot: MakeSlot, *, by_examples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_examples:  # as metrics that are no sums
        monkeypatch.setattr(
            "understudy.evaluator.evaluation.part_scores.PartSums.unusable", lambda _: ["loss", "auc", "mae"]
        )
    labels = [1, 1, 1, 0, 1, 1, 1, 1]
    groups = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    scores = column(0.9, 0.3, 0.8, 0.5, 0.7, 0.2, 0.1, 0.9)
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=40)
    found = exactness.score_parts(make_slot(scorer_of_odds()), [(scores, column(*labels))], [groups], options)

    both, one = found.slices
    assert both.metrics.keys() == {"loss", "auc", "mae"}
    assert one.metrics.keys() == {"loss", "mae"}
    assert (both.undefined, one.undefined) == ({}, {"auc": undefined_values.NO_NEGATIVE})
    assert one.intervals.keys() == {"loss", "mae"}
    assert "auc[group=1]" not in found.resampled
    lacks = draw(SEED, 40, 0, 8)[:, 3] == 0
    assert 0 < lacks.sum() < 40
    np.testing.assert_array_equal(np.isnan(found.resampled["auc"]), lacks)
    assert not np.isnan(found.resampled["mae"]).any()
    note = f"auc is undefined in {lacks.sum()} of 40 resamples, which its interval leaves out"
    assert found.notes == (note,)
    assert [len([note for note in part.notes if "undefined" in note]) for part in (both, one)] == [1, 0]
    interval = np.nanquantile(found.resampled["auc"], [0.025, 0.975])
    assert (found.intervals["auc"].low, found.intervals["auc"].high) == pytest.approx(tuple(interval), abs=1e-6)


@pytest.mark.parametrize("by_examples", [True, False])
def test_a_slice_that_many_resamples_do_not_draw_says_so(
    make_slot: MakeSlot, *, by_examples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_examples:
        monkeypatch.setattr(
            "understudy.evaluator.evaluation.part_scores.PartSums.unusable", lambda _: ["loss", "auc", "mae"]
        )
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=40)
    batch = (column(0.2, 0.8, 0.3, 0.6), column(0, 1, 0, 1))
    found = exactness.score_parts(make_slot(scorer_of_odds()), [batch], [np.array([0, 1, 1, 1])], options)
    missing = int((draw(SEED, 40, 0, 4)[:, 0] == 0).sum())
    assert found.slices[0].notes == (f"{missing} of 40 resamples draw no example, which the intervals leave out",)


def test_the_losses_of_slices_and_resamples_without_weights_are_undefined(make_slot: MakeSlot) -> None:
    weights = np.array([0, 0, 1, 1], np.float32)
    batch = (column(0.2, 0.8, 0.3, 0.6), column(0, 1, 0, 1), weights)
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=40)
    found = exactness.score_parts(make_slot(scorer_of_odds()), [batch], [np.array([0, 0, 1, 1])], options)

    without, _ = found.slices
    assert (without.metrics, without.intervals) == ({}, {})
    assert without.undefined.keys() == {"loss", "auc", "mae"}
    lacks = draw(SEED, 40, 0, 4)[:, 2:].sum(axis=1) == 0
    assert lacks.any()
    np.testing.assert_array_equal(np.isnan(found.resampled["loss"]), lacks)


def test_the_losses_of_slices_of_a_model_without_increments_are_undefined_where_nothing_counts(
    make_slot: MakeSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.evaluator.model.increments.MAX_STATE", 0)
    slot = make_slot(scorer_of_odds())
    rows = (column(0.2, 0.8, 0.3, 0.6), column(0, 1, 0, 1))
    batches = [(*rows, np.array(weights, np.float32)) for weights in ([0, 0, 1, 0], [0, 0, 0, 2])]
    groups = [np.array([0, 1, 1, 2]), np.array([0, 0, 1, 2])]
    found = exactness.score_parts(slot, batches, groups, BreakdownOptions(slices=parse_slices([exactness.GROUP])))

    assert [part.undefined.get("loss") for part in found.slices] == [undefined_values.NO_LOSS, None, None]
    assert [part.metrics.keys() for part in found.slices] == [set(), {"loss", "mae"}, {"loss", "mae"}]


def test_the_losses_of_slices_of_a_masked_output_without_increments_are_undefined_where_all_is_masked(
    make_slot: MakeSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.evaluator.model.increments.MAX_STATE", 0)
    slot = make_slot(masked_and_whole())
    tokens = np.array([[0, 0, 0], [1, 2, 0]], "i4")
    batch = (tokens, [np.zeros((2, 3), "i4"), column(1, 2)])
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]))
    masked, whole = exactness.score_parts(slot, [batch], [np.array([0, 1])], options).slices

    assert masked.undefined == {"tags_loss": undefined_values.NO_LOSS, "tags_accuracy": undefined_values.NO_MEAN}
    assert whole.undefined == {}
