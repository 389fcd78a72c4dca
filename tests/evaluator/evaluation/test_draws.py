from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.evaluator.evaluation.bootstrap import draw

EXAMPLES, RESAMPLES = 60, 37
WHOLE = draw(5, RESAMPLES, 0, EXAMPLES)


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(1, EXAMPLES - 1), unique=True), resamples=st.integers(1, RESAMPLES))
def test_a_draw_depends_only_on_the_seed_the_resample_and_the_place_of_the_example(
    cuts: list[int], resamples: int
) -> None:
    places = [0, *sorted(cuts), EXAMPLES]
    parts = [draw(5, resamples, first, last - first) for first, last in itertools.pairwise(places)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), WHOLE[:resamples])


def test_draws_are_poisson_distributed_and_independent() -> None:
    draws = draw(0, 200, 10**9, 5000).astype(float)
    counts = np.bincount(draws.astype(int).ravel(), minlength=5)[:5] / draws.size
    np.testing.assert_allclose(counts, [0.3679, 0.3679, 0.1839, 0.0613, 0.0153], atol=0.001)
    assert abs(draws.var() - 1) < 0.01
    between = np.corrcoef(draws)[np.triu_indices(200, 1)]
    assert abs(between.mean()) < 0.002
    assert abs(between.std() - 1 / np.sqrt(5000)) < 0.002
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.005


def test_another_seed_gives_other_draws() -> None:
    assert (draw(6, RESAMPLES, 0, EXAMPLES) != WHOLE).any()


def test_no_resamples_have_no_draws() -> None:
    assert draw(0, 0, 0, 3).shape == (0, 3)
