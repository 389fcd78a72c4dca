"""Drift against its definitions, computed from all values by SciPy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from understudy.evaluator.evaluation.drift import (
    LEAST_SHARE,
    MISSING,
    OTHERS,
    CategorySketch,
    DriftSketches,
    FeatureDrift,
    NumberSketch,
    population_stability,
)
from understudy.evaluator.types import Array, OutputTask


def drift(reference: Array, sample: Array, *, batches: int = 1) -> FeatureDrift:
    one, other = DriftSketches(), DriftSketches()
    for part in np.array_split(reference, batches):
        one.add("input", {"x": part})
    for part in np.array_split(sample, batches):
        other.add("input", {"x": part})
    (found,) = one.compare(other).features
    return found


def test_the_index_is_what_its_definition_gives_by_hand() -> None:
    by_hand = (0.2 - 0.5) * np.log(0.2 / 0.5) + (0.3 - 0.3) * np.log(1) + (0.5 - 0.2) * np.log(0.5 / 0.2)
    assert population_stability([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]) == pytest.approx(by_hand)
    empty = (0.4 - 1) * np.log(0.4) + (0.6 - LEAST_SHARE) * np.log(0.6 / LEAST_SHARE)
    assert population_stability([1.0, 0.0], [0.4, 0.6]) == pytest.approx(empty)


def test_numbers_are_counted_between_the_deciles_of_the_reference() -> None:
    found = drift(np.arange(1, 101), np.arange(51, 151))
    assert [each.label for each in found.bins][:2] == ["(-inf, 10]", "(10, 20]"]
    assert [each.reference for each in found.bins] == pytest.approx([0.1] * 10)
    assert [each.share for each in found.bins] == pytest.approx([0] * 5 + [0.1] * 4 + [0.6], abs=1e-12)
    shares = np.maximum([0.0] * 5 + [0.1] * 4 + [0.6], LEAST_SHARE)
    assert found.psi == pytest.approx(float(np.sum((shares - 0.1) * np.log(shares / 0.1))))
    assert found.psi_by_chance == pytest.approx(9 * 2 / 100)
    assert found.ks == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shift", "scale", "count"), [(0.0, 1.0, 700), (0.3, 1.0, 20_000), (0.0, 2.0, 20_000), (5.0, 1.0, 3000)]
)
def test_the_distance_is_that_of_scipy_within_the_bound_of_the_sketches(shift: float, scale: float, count: int) -> None:
    random = np.random.default_rng(5)
    reference, sample = random.normal(size=count), random.normal(shift, scale, size=count + 100)
    found = drift(reference, sample)
    expected = float(stats.ks_2samp(reference, sample).statistic)
    assert found.ks == pytest.approx(expected, abs=(found.ks_error or 0.0) + 1e-12)
    assert found.ks_error == (0 if count < 1000 else pytest.approx(0.0073, abs=0.0002))


def test_a_value_that_many_examples_have_is_in_one_bin() -> None:
    reference = np.repeat([0, 1], [700, 300])
    found = drift(reference, np.repeat([0, 1], [400, 600]))
    assert [each.reference for each in found.bins] == pytest.approx([0.7, 0.3])
    assert [each.share for each in found.bins] == pytest.approx([0.4, 0.6])
    assert found.ks == pytest.approx(0.3)


def test_values_that_are_not_finite_have_a_bin_of_their_own() -> None:
    found = drift(np.array([1.0, 2.0, 3.0, np.nan]), np.array([1.0, np.inf, np.nan, np.nan]))
    assert found.bins[-1].label == MISSING
    assert (found.bins[-1].reference, found.bins[-1].share) == (0.25, 0.75)
    assert sum(each.share for each in found.bins) == pytest.approx(1)
    assert found.ks == pytest.approx(2 / 3)


def test_strings_are_counted_by_value_and_rare_ones_together() -> None:
    reference = np.array([b"FR"] * 60 + [b"DE"] * 40, object)
    found = drift(reference, np.array([b"FR"] * 30 + [b"DE"] * 40 + [b"new"] * 30, object))
    assert [each.label for each in found.bins] == ["FR", "DE", OTHERS]
    assert [each.reference for each in found.bins] == pytest.approx([0.6, 0.4, 0.0])
    assert [each.share for each in found.bins] == pytest.approx([0.3, 0.4, 0.3])
    assert found.ks is None
    many = np.array([f"user-{number}".encode() for number in range(50_000)], object)
    found = drift(many, many[::-1])
    assert len(found.bins) <= 21
    assert found.psi < 0.01


def test_features_are_bounded_and_large_tensors_are_one_feature() -> None:
    sketches = DriftSketches(max_features=4)
    sketches.add("input", {"a": np.zeros((5, 2)), "b": np.zeros((5, 8, 8)), "c": np.zeros(5), "d": np.zeros(5)})
    report = sketches.compare(sketches)
    assert sorted(each.name for each in report.features) == ["a[0]", "a[1]", "b", "c"]
    assert report.left_out == ("d",)
    (pooled,) = [each for each in report.features if each.name == "b"]
    assert pooled.count == 5 * 64
    assert report.pooled == {}  # places of an image are no columns


def test_many_inputs_leave_the_outputs_their_features() -> None:
    sketches = DriftSketches(max_features=3)
    sketches.add("input", {"a": np.zeros((5, 3)), "b": np.zeros(5)})
    sketches.add_scores({"digit": np.eye(2)}, {})
    report = sketches.compare(sketches)
    found = sorted((each.kind, each.name) for each in report.features if each.kind != "input")
    assert found == [("class", "digit"), ("score", "digit[0]"), ("score", "digit[1]")]
    assert report.left_out == ("b",)


def test_columns_that_are_one_feature_together_are_named_with_their_number() -> None:
    sketches = DriftSketches(max_features=4)
    sketches.add("input", {"a": np.zeros((5, 2)), "b": np.zeros((5, 3))})
    other = sketches.like_this()
    other.add("input", {"a": np.zeros((5, 2)), "b": np.zeros((5, 3))})
    assert sketches.compare(other).pooled == {"b": 3}


def test_scores_have_classes_too() -> None:
    sketches, other = DriftSketches(), DriftSketches()
    sketches.add_scores({"digit": np.eye(3, dtype=np.float32)[[0, 1, 2, 2]]}, {})
    other.add_scores({"digit": np.eye(3, dtype=np.float32)[[2, 2, 2, 2]]}, {})
    (classes,) = [each for each in sketches.compare(other).features if each.kind == "class"]
    assert [(each.label, each.reference, each.share) for each in classes.bins] == [
        ("2", 0.5, 1.0),
        ("0", 0.25, 0.0),
        ("1", 0.25, 0.0),
        (OTHERS, 0.0, 0.0),
    ]


LABELS = np.array([[0.9, 0.8, 0.1], [0.8, 0.9, 0.4], [0.7, 0.2, 0.6], [0.1, 0.2, 0.3]], np.float32)


@pytest.mark.parametrize(
    ("task", "scores"),
    [
        ({"y": OutputTask(kind="multilabel", scores="probabilities")}, LABELS),
        ({"y": OutputTask(kind="multilabel", scores="logits")}, LABELS - np.float32(0.5)),
        ({}, LABELS),
        ({"y": OutputTask(kind="unknown")}, LABELS),
    ],
)
def test_each_label_of_several_is_a_class_of_its_own(task: dict[str, OutputTask], scores: Array) -> None:
    sketches = DriftSketches()
    sketches.add_scores({"y": scores}, task)
    other = sketches.like_this()
    other.add_scores({"y": scores[:1]}, {})
    found = {each.name: each for each in sketches.compare(other).features if each.kind == "class"}
    assert sorted(found) == ["y[0]", "y[1]", "y[2]"]
    for label, expected in enumerate(([1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 0])):
        shares = {each.label: (each.reference, each.share) for each in found[f"y[{label}]"].bins}
        assert shares[str(expected[0])] == (expected.count(expected[0]) / 4, 1.0)


def test_a_single_label_has_a_class_and_a_regression_none() -> None:
    binary, regression = OutputTask(kind="binary", scores="probabilities"), OutputTask(kind="regression")
    for task, names in ((binary, ["y"]), (regression, [])):
        sketches = DriftSketches()
        sketches.add_scores({"y": LABELS[:, :1]}, {"y": task})
        assert [each.name for each in sketches.compare(sketches).features if each.kind == "class"] == names
    several = DriftSketches()
    several.add_scores({"y": LABELS}, {"y": regression})
    assert [each.kind for each in several.compare(several).features] == ["score"] * 3


def test_what_one_sample_lacks_is_named() -> None:
    one, other = DriftSketches(), DriftSketches()
    one.add("input", {"age": np.zeros(3), "x": np.zeros(3)})
    other.add("input", {"country": np.zeros(3), "x": np.zeros(3)})
    assert one.compare(other).unmatched == ("age", "country")


@settings(max_examples=40)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.just(float("nan")), min_size=1, max_size=400),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_neither_order_nor_batches_matter_and_a_sample_does_not_drift_from_itself(
    values: list[float], batches: int, random: object
) -> None:
    array = np.array(values)
    shuffled = array.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = drift(array, shuffled, batches=batches)
    assert found.psi == pytest.approx(0, abs=1e-12)
    assert found.ks == pytest.approx(0, abs=1e-12)


def test_beyond_what_is_kept_order_and_batches_matter_within_the_bound() -> None:
    array = np.random.default_rng(1).exponential(size=50_000)
    for sample in (array, np.sort(array)):
        found = drift(array, sample, batches=37)
        assert found.ks is not None
        assert found.ks <= (found.ks_error or 0)
        assert found.psi < 0.003


@pytest.mark.parametrize("sketch", [NumberSketch, CategorySketch])
def test_merged_sketches_are_those_of_all_values(sketch: type[NumberSketch | CategorySketch]) -> None:
    values = np.arange(600) % 7
    merged, part, whole = sketch(), sketch(), sketch()
    merged.update(values[:100])
    part.update(values[100:])
    merged.merge(part)  # type: ignore[arg-type]
    whole.update(values)
    assert merged.count == whole.count == 600
    found = whole.compare(merged)  # type: ignore[arg-type]
    assert np.allclose(found.reference, found.shares)
