"""The paired bootstrap against a reference in NumPy, against SciPy's, and against the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from understudy.evaluator.evaluation import bootstrap
from understudy.evaluator.evaluation.comparison import (
    BootstrapOptions,
    LossDifference,
    LossResampling,
    difference,
)
from understudy.evaluator.evaluator_errors import InvalidInputError


def resample(losses: Any, cuts: list[int], **options: Any) -> LossDifference:
    """Return the difference of the second example of losses to the first, given in batches cut at these examples."""
    chosen = BootstrapOptions(**options)
    resampling = LossResampling(chosen, versions=2)
    for first, second in zip(*(np.split(row, cuts) for row in losses), strict=True):
        resampling.add([first, second])
    baseline, other = resampling.results()
    return difference(other, baseline, confidence=chosen.confidence)


def reference(losses: Any, *, resamples: int, confidence: float, seed: int) -> LossDifference:
    """Do the same over all examples at once, in as few words as possible."""
    apart = losses[1] - losses[0]
    weights = bootstrap.draw(seed, resamples, 0, len(apart)).T.astype(float)
    means = (apart @ weights) / weights.sum(axis=0)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return LossDifference(mean=apart.mean(), low=low, high=high)


def draw(seed: int, rows: int, *, better_by: float) -> Any:
    """Draw two versions' losses that have most of their noise in common."""
    rng = np.random.default_rng(seed)
    hardness = rng.gamma(2.0, size=rows)
    return np.stack([hardness + rng.normal(0, 0.1, rows), hardness - better_by + rng.normal(0, 0.1, rows)])


@pytest.mark.parametrize("cuts", [[], [1], [3, 10, 11, 400]])
def test_the_interval_is_the_references_however_the_examples_are_cut_into_batches(cuts: list[int]) -> None:
    losses = draw(1, 500, better_by=0.02)
    found = resample(losses, cuts, resamples=300, confidence=0.9, seed=5)
    expected = reference(losses, resamples=300, confidence=0.9, seed=5)
    assert (found.mean, found.low, found.high) == pytest.approx((expected.mean, expected.low, expected.high), rel=1e-9)


def test_large_batches_are_drawn_in_chunks_with_the_same_result() -> None:
    losses = draw(2, 450, better_by=0.0)
    found = resample(losses, [], resamples=5000, seed=1)
    expected = reference(losses, resamples=5000, confidence=0.95, seed=1)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_the_interval_is_about_scipys() -> None:
    losses = draw(3, 400, better_by=0.05)
    found = resample(losses, [], resamples=4000)
    theirs = stats.bootstrap(
        (losses[1], losses[0]),
        lambda one, other, axis: np.mean(one - other, axis=axis),
        paired=True,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert found.low == pytest.approx(theirs.low, abs=0.1 * width)
    assert found.high == pytest.approx(theirs.high, abs=0.1 * width)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    truth = -0.01
    found = [resample(draw(seed, 200, better_by=-truth), [], resamples=400, confidence=0.9) for seed in range(200)]
    covered = sum(interval.low <= truth <= interval.high for interval in found)
    assert 165 <= covered <= 195


def test_pairing_finds_what_the_noise_of_the_examples_would_hide() -> None:
    found = resample(draw(4, 400, better_by=0.05), [], resamples=500)
    assert found.high < 0.0


def test_a_version_does_not_differ_from_itself() -> None:
    losses = draw(5, 50, better_by=0.0)[0]
    assert resample(np.stack([losses, losses]), []) == LossDifference(mean=0.0, low=0.0, high=0.0)


def test_a_loss_that_is_not_a_number_makes_none_of_the_interval() -> None:
    losses = draw(6, 50, better_by=0.0)
    losses[1, 7] = np.nan
    found = resample(losses, [])
    assert np.isnan([found.mean, found.low, found.high]).all()


def test_infinite_losses_give_no_bounds_and_in_both_versions_no_difference() -> None:
    losses = draw(6, 50, better_by=0.0)
    losses[1, 7] = np.inf
    assert resample(losses, []) == LossDifference(mean=np.inf, low=-np.inf, high=np.inf)
    losses[0, 7] = np.inf
    assert np.isnan(resample(losses, []).mean)


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_so_few_examples_that_resamples_may_draw_none_give_no_bounds(examples: int) -> None:
    found = resample(np.array([[1.0] * examples, [3.0] * examples]), [], resamples=1000)
    assert (found.mean, found.low, found.high) == (2.0, -np.inf, np.inf)


def test_few_resamples_without_an_example_count_as_beyond_both_bounds() -> None:
    losses = draw(7, 4, better_by=0.0)
    found = resample(losses, [], resamples=1000)
    weights = bootstrap.draw(0, 1000, 0, 4).T.astype(float)
    drawn = weights.sum(axis=0) > 0
    assert 0 < (~drawn).sum() < 25
    means = ((losses[1] - losses[0]) @ weights)[drawn] / weights.sum(axis=0)[drawn]
    expected = [np.quantile([*means, *np.full((~drawn).sum(), fill)], at) for fill, at in ((-9, 0.025), (9, 0.975))]
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resamples": 0}, "0 resamples.*1 to 10000"),
        ({"resamples": 10_001}, "10001 resamples"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"confidence": float("nan")}, "confidence is nan"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        BootstrapOptions(**options)
