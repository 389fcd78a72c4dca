"""When what a shadow computed speaks against it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.rollout_plan import ShadowPlan
from understudy.evaluator.serving.shadow_health import ShadowCounts, ShadowTally, shadow_complaint, shadow_counts

PLAN = ShadowPlan(share=0.05, after_seconds=60.0, most_disagreement=0.02)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (ShadowCounts(compared=19, disagreeing=19.0, not_finite=19), ""),
        (ShadowCounts(compared=20, disagreeing=1.0), ""),
        (ShadowCounts(compared=1000, disagreeing=20.0), ""),
        (ShadowCounts(compared=1000, disagreeing=31.0), ""),
        (ShadowCounts(compared=1000, disagreeing=50.0), "5.00% of the answers to 1000 requests differ (3.5"),
        (
            ShadowCounts(compared=20, not_finite=1),
            "of 20 requests that the serving version answered, 0 failed, and 1 a",
        ),
        (ShadowCounts(compared=90, errors=2), "of 92 requests that the serving version answered, 2 failed"),
        (ShadowCounts(compared=10_000, errors=1), ""),
        (ShadowCounts(compared=100, dropped=10**6), ""),
    ],
)
def test_it_is_taken_back_when_the_whole_interval_is_beyond_a_limit(counts: ShadowCounts, reason: str) -> None:
    found = shadow_complaint(counts, PLAN)
    assert found.startswith(reason) if reason else not found


def test_without_a_limit_no_disagreement_takes_it_back() -> None:
    plan = ShadowPlan(share=0.05, after_seconds=60.0)
    assert not shadow_complaint(ShadowCounts(compared=10**6, disagreeing=1e6), plan)


def test_servers_count_from_zero_and_after_a_restart_from_their_last_known_report_on() -> None:
    first, later = ShadowCounts(compared=10, disagreeing=1.0), ShadowCounts(compared=25, disagreeing=2.0)
    fresh = ShadowTally()
    resumed = ShadowTally(ShadowCounts(compared=100), {"one": ShadowCounts(compared=4, disagreeing=0.5)})
    unknown = ShadowTally(ShadowCounts(compared=100), None)
    for tally in (fresh, resumed, unknown):
        tally.add("one", first)
        tally.add("one", later)
        tally.add("one", ShadowCounts(compared=3, largest_difference=0.5))  # it was started again
    assert [tally.total.compared for tally in (fresh, resumed, unknown)] == [28, 124, 118]
    assert (fresh.total.disagreeing, resumed.total.disagreeing) == (2.0, 1.5)
    assert fresh.total.largest_difference == 0.5


def test_a_server_that_was_started_again_and_has_compared_more_by_now_counts_from_zero() -> None:
    tally = ShadowTally()
    tally.add("one", ShadowCounts(compared=10, disagreeing=5.0, seconds=1.0))
    tally.add("one", ShadowCounts(compared=20, disagreeing=1.0, seconds=0.5))
    assert (tally.total.compared, tally.total.disagreeing) == (30, 6.0)


@given(
    st.fixed_dictionaries(
        {
            "compared": st.integers(-(2**63), 2**63 - 1),
            "disagreeing": st.floats(),
            "not_finite": st.integers(-(2**63), 2**63 - 1),
            "seconds": st.floats(),
        }
    )
)
def test_whatever_a_server_sends_makes_sense_afterwards(values: dict[str, float]) -> None:
    counts = shadow_counts(values)
    assert 0 <= counts.disagreeing <= counts.compared
    assert 0 <= counts.not_finite <= counts.compared
    assert not math.isnan(counts.seconds)
    shadow_complaint(counts, PLAN)
