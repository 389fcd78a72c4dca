"""Intervals against SciPy's and against the truth, and p-values against their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from testkit.coverage import EXAMPLES, Sums, count_covered, draw_increments, scored
from understudy.evaluator.evaluation import breakdown as module
from understudy.evaluator.evaluation.bootstrap import holm, p_value
from understudy.evaluator.evaluation.breakdown import Breakdown, BreakdownOptions, BrokenDown
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Batch, OutputTask


def break_down(options: BreakdownOptions, *, batches: int = 1) -> BrokenDown:
    increments, _ = draw_increments(np.random.default_rng(7), EXAMPLES)
    breakdown = Breakdown(options, {"y": OutputTask(kind="binary")})
    features = {"place": np.arange(EXAMPLES), "half": np.arange(EXAMPLES) // 250}
    for rows in np.array_split(np.arange(EXAMPLES), batches):
        part = {name: values[rows] for name, values in features.items()}
        batch = Batch(inputs={"x": rows}, targets={"y": rows}, features=part)
        breakdown.add(batch, scored(increments[rows]), {})
    return breakdown.finish()


@pytest.mark.parametrize("metric", ["accuracy", "f1", "rmse", "auc"])
def test_intervals_are_those_of_scipys_bootstrap(metric: str) -> None:
    found = break_down(BreakdownOptions(resamples=2000)).intervals[metric]
    increments, _ = draw_increments(np.random.default_rng(7), EXAMPLES)

    def statistic(places: np.ndarray, axis: int) -> np.ndarray:
        """Return the metric of the resamples, ``[...]``, with the examples at these places, ``[..., examples]``."""
        assert axis == -1
        counts = [np.bincount(each, minlength=EXAMPLES) for each in places.reshape(-1, EXAMPLES)]
        found: np.ndarray = Sums().results(np.stack(counts) @ increments)[metric]
        return found.reshape(places.shape[:-1])

    expected = stats.bootstrap(
        [np.arange(EXAMPLES)], statistic, n_resamples=2000, method="percentile", rng=1
    ).confidence_interval
    width = expected.high - expected.low
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=0.08 * width)


def test_most_intervals_contain_the_truth() -> None:
    draws = 80
    covered = count_covered(3, draws, resamples=150)
    for name in ("accuracy", "f1", "rmse", "auc", "rare slice"):
        assert covered[name] / draws >= 0.86, (name, covered[name])


def test_the_sizes_of_the_batches_do_not_matter() -> None:
    options = BreakdownOptions(slices=parse_slices(["half"]), resamples=30)
    first, second = (break_down(options, batches=batches) for batches in (1, 7))
    assert [part.name for part in first.slices] == ["half=0", "half=1"]
    for one, other in zip(first.slices, second.slices, strict=True):
        assert one.examples == other.examples == 250
        assert one.metrics == pytest.approx(other.metrics, rel=1e-12)
    for name, values in first.resampled.items():
        np.testing.assert_allclose(values, second.resampled[name], rtol=1e-6)
    assert set(first.resampled) == {f"{metric}{part}" for metric in Sums.needs for part in ("", "[half=0]", "[half=1]")}


def test_a_setting_with_too_many_values_is_left_out_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.evaluator.evaluation.slices.MAX_SLICES", 100)
    found = break_down(BreakdownOptions(slices=parse_slices(["place", "half"])), batches=10)
    assert [part.name for part in found.slices] == ["half=0", "half=1"]
    (note,) = found.notes
    assert "slice 'place' is left out: it has 500 values, and at most 100 are scored" in note


def test_a_name_that_two_settings_give_is_one_slice_and_a_note_says_so() -> None:
    options = BreakdownOptions(slices=parse_slices(["place:100", "place:100,200"]), resamples=20)
    found = break_down(options, batches=3)
    names = ["place<100", "place>=100", "place=[100,200)", "place>=200"]
    assert [(part.name, part.examples) for part in found.slices] == list(zip(names, [100, 400, 100, 300], strict=True))
    assert found.notes == ("slice 'place<100' of 'place:100,200' is left out: 'place:100' has one of this name",)
    assert {name.partition("[")[2] for name in found.resampled} == {"", *(f"{name}]" for name in names)}


def test_resamples_that_need_too_much_memory_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MEMORY", 2**20)
    found = break_down(BreakdownOptions(slices=parse_slices(["half"]), resamples=500), batches=4)
    assert not found.intervals
    assert not found.resampled
    assert [part.examples for part in found.slices] == [250, 250]
    assert "there are no intervals, because 500 resamples of" in found.notes[0]


def test_more_slices_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SLICES", 3)
    with pytest.raises(InvalidInputError, match="more than 3 slices in all"):
        break_down(BreakdownOptions(slices=parse_slices(["half", "place:100,200"])))


def test_holms_correction_is_that_of_the_textbook() -> None:
    assert holm([0.01, 0.04, 0.03, math.nan, 0.005])[:3] == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.01, 0.04, 0.03, math.nan, 0.005])[4] == pytest.approx(0.02)
    assert math.isnan(holm([0.01, math.nan])[1])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_p_values_go_on_where_resamples_end() -> None:
    rng = np.random.default_rng(0)
    near, far = rng.normal(1, 0.8, 1000), rng.normal(8, 1, 1000)
    assert p_value(1.0, near) == pytest.approx(2 * stats.norm.sf(1 / 0.8), rel=0.25)
    assert p_value(8.0, far) == pytest.approx(2 * stats.norm.sf(8), rel=20)
    assert p_value(8.0, far) < 1e-12
    assert p_value(0.0, np.zeros(9)) == 1.0
    assert math.isnan(p_value(1.0, np.full(9, np.nan)))


def test_a_p_value_is_never_0() -> None:
    assert p_value(-1.0, np.full(200, -1.0)) == 1 / 200, "nothing to go on from: all examples differ alike"
    assert 0 < p_value(1.0, np.random.default_rng(0).normal(1.0, 1e-3, 200)) < 1e-300


def test_resamples_without_a_difference_count_as_on_the_other_side_of_0() -> None:
    some = np.concatenate([np.linspace(1.0, 2.0, 95), np.full(5, np.nan)])

    assert p_value(1.5, some) == pytest.approx(0.1)
    assert p_value(0.5, np.concatenate([np.linspace(-0.1, 1.0, 10), np.full(90, np.nan)])) == 1.0
