from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.service.sample_gaps import SampleGaps

SMALLEST, LARGEST = math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0)


@given(share=st.floats(0.0, 1.0), uniform=st.floats(0.0, LARGEST))
def test_any_share_has_a_gap_that_counts_items(share: float, uniform: float) -> None:
    gap = SampleGaps(share, lambda: uniform).draw()
    assert gap >= 0
    assert math.isinf(gap) or gap == int(gap)


@pytest.mark.parametrize("share", [SMALLEST, 1e-310, 1e-300])
def test_the_smallest_shares_pass_over_whatever_comes(share: float) -> None:
    assert SampleGaps(share, lambda: 0.5).draw() > 2**63


@pytest.mark.parametrize(("share", "gap"), [(0.0, math.inf), (1.0, 0)])
def test_nothing_and_everything_are_samples(share: float, gap: float) -> None:
    assert SampleGaps(share, lambda: 0.75).draw() == gap


def test_the_gaps_are_those_of_a_geometric_distribution() -> None:
    gaps = SampleGaps(0.5, iter((0.0, 0.4, 0.6, 0.8)).__next__)
    assert [gaps.draw() for _ in range(4)] == [0, 0, 1, 2]
