"""When the servers of a part do clearly worse than the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.serving.rollout_health import (
    LATENCY_BOUNDS_SECONDS,
    Tally,
    Traffic,
    complaint,
    place_of,
    trimmed,
    wilson,
)


def traffic(seconds: list[float], errors: int = 0) -> Traffic:
    counts = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
    for each in seconds:
        counts[place_of(each)] += 1
    return Traffic(requests=len(seconds), errors=errors, latencies=tuple(trimmed(counts)))


FAST = traffic([0.004] * 1000)


@pytest.mark.parametrize(
    ("part", "others", "text"),
    [
        (traffic([0.004] * 80, errors=20), FAST, "20 of its 100 requests failed, and 0 of 1000 at the others"),
        (traffic([0.05] * 30), FAST, "30 of its 30 requests took longer than 0.0128 s; 99 in 100 of the others' 1000"),
        (traffic([0.004] * 95 + [0.05] * 9), FAST, "9 of its 104 requests took longer"),
        (traffic([], errors=40), Traffic(), "40 of its 40 requests failed, and 0 of 0 at the others"),
    ],
)
def test_what_is_clearly_worse_is_told_with_its_numbers(part: Traffic, others: Traffic, text: str) -> None:
    assert text in complaint(part, others)


@pytest.mark.parametrize(
    ("part", "others"),
    [
        (traffic([], errors=19), FAST),  # too few to tell
        (traffic([0.05] * 19), FAST),
        (traffic([0.004] * 99, errors=1), FAST),
        (traffic([0.004] * 70, errors=30), traffic([0.004] * 70, errors=30)),
        (traffic([0.05] * 100), traffic([0.05] * 100)),
        (traffic([0.05] * 100), traffic([0.04] * 100)),
        (traffic([0.009] * 100), traffic([0.001] * 100)),  # too short to be slow
        (traffic([0.05] * 100), traffic([0.001] * 5)),
        (traffic([0.004] * 80, errors=20), Traffic()),
        (Traffic(), FAST),
    ],
)
def test_what_is_not_clearly_worse_goes_on(part: Traffic, others: Traffic) -> None:
    assert complaint(part, others) == ""


def test_a_part_that_does_as_the_others_is_taken_back_in_less_than_one_of_a_hundred_looks() -> None:
    draw = np.random.default_rng(3)

    def sample(count: int) -> Traffic:
        return traffic(draw.lognormal(-4, 0.8, size=count).tolist(), errors=int(draw.binomial(count, 0.05)))

    complaints = [complaint(sample(200), sample(1800)) for _ in range(300)]
    assert sum(map(bool, complaints)) <= 3


@given(st.integers(1, 10_000), st.data())
def test_the_interval_of_a_share_holds_the_share(of: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, of))
    low, high = wilson(count, of)
    assert 0 <= low <= count / of + 1e-12
    assert count / of - 1e-12 <= high <= 1


@given(st.lists(st.floats(1e-6, 40), min_size=1, max_size=200))
def test_the_99th_percentile_is_at_most_a_root_of_two_too_high(seconds: list[float]) -> None:
    exact = sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]
    found = traffic(seconds).p99_seconds
    assert exact <= found
    assert found <= max(exact * math.sqrt(2), LATENCY_BOUNDS_SECONDS[0]) * (1 + 1e-9)


def test_what_servers_report_is_added_from_their_first_report_on_and_over_their_restarts() -> None:
    tally = Tally()
    tally.add("old", traffic([0.1] * 50, errors=5), from_zero=False)
    assert tally.total == Traffic()
    tally.add("old", traffic([0.1] * 53, errors=6), from_zero=False)
    tally.add("old", traffic([0.2] * 2), from_zero=False)  # it was started again
    assert (tally.total.requests, tally.total.errors) == (5, 1)
    tally.add("new", traffic([0.1] * 4), from_zero=True)
    assert tally.total == traffic([0.1] * 7 + [0.2] * 2, errors=1)
