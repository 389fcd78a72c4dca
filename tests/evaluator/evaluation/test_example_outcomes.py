"""The hardest examples, and those that two versions decide differently."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from understudy.evaluator.evaluation import example_outcomes
from understudy.evaluator.evaluation.example_outcomes import HardestExamples, Outcomes, flips, mcnemar, outcomes_of
from understudy.evaluator.evaluator_errors import LedgerError


@given(losses=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, np.nan, np.inf]), min_size=1), size=st.integers(1, 7))
def test_the_hardest_examples_are_the_first_of_the_greatest_losses(losses: list[float], size: int) -> None:
    hardest = HardestExamples(limit=4)
    for first in range(0, len(losses), size):
        hardest.add(first, np.array(losses[first : first + size]), lambda index: {"place": index})
    ranks = [np.inf if np.isnan(loss) else loss for loss in losses]
    expected = sorted(range(len(losses)), key=lambda index: (-ranks[index], index))[:4]
    assert [one["index"] for one in hardest.document()] == expected
    assert [one["place"] for one in hardest.document()] == [index % size for index in expected]


@given(right=st.lists(st.booleans(), min_size=1), size=st.integers(1, 20))
def test_outcomes_are_read_as_they_were_written(right: list[bool], size: int) -> None:
    outcomes = Outcomes()
    for first in range(0, len(right), size):
        outcomes.add(np.array(right[first : first + size]))
    document = outcomes.document()
    assert document is not None
    assert outcomes_of(document).tolist() == right
    assert (document["examples"], document["right"]) == (len(right), sum(right))


def test_the_outcomes_of_too_many_examples_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_outcomes, "MAX_OUTCOMES", 10)
    outcomes = Outcomes()
    for _ in range(3):
        outcomes.add(np.ones(4, bool))
    assert outcomes.document() is None


def test_damaged_outcomes_are_named() -> None:
    with pytest.raises(LedgerError, match="damaged"):
        outcomes_of({"examples": 8, "bits": "AAAA"})


@given(pairs=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_flips_are_the_four_counts_of_two_versions(pairs: list[tuple[bool, bool]]) -> None:
    right, baseline = np.array(pairs).T
    found = flips(right, baseline)
    assert found.newly_wrong.tolist() == [i for i, pair in enumerate(pairs) if pair == (False, True)]
    assert found.newly_right.tolist() == [i for i, pair in enumerate(pairs) if pair == (True, False)]
    assert (found.both_right, found.both_wrong) == (pairs.count((True, True)), pairs.count((False, False)))


@given(newly_wrong=st.integers(0, 300), newly_right=st.integers(0, 300))
def test_mcnemar_is_the_exact_binomial_test_of_scipy(newly_wrong: int, newly_right: int) -> None:
    changes = newly_wrong + newly_right
    expected = binomtest(newly_wrong, changes).pvalue if changes else 1.0
    assert mcnemar(newly_wrong, newly_right) == pytest.approx(expected, rel=1e-9)
