"""What is taken, and when it is clear."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.cli.tune_search import (
    LEAST_TURNS,
    MOST_TURNS,
    Ratio,
    Search,
    Trial,
    Turn,
    candidates,
    compare,
    ratio_of,
    scores_differ,
    whisker,
)


def turns(*rates: float, p99_ms: float = 5.0) -> Callable[[], Turn]:
    """Return a server that answers so many requests per second, one turn after the other."""
    endless = cycle(rates)
    return lambda: Turn(requests_per_second=next(endless), p99_ms=p99_ms)


def tried(candidate: Callable[[], Turn], *, max_p99_ms: float | None = None, most: int = 1000) -> Trial:
    left = iter(range(most))
    return compare(
        "intra_op_threads",
        1,
        candidate=candidate,
        best=turns(100.0, 101.0, 99.0),
        max_p99_ms=max_p99_ms,
        has_time=lambda: next(left, None) is not None,
    )


def test_a_candidate_that_answers_clearly_more_is_taken_early() -> None:
    trial = tried(turns(150.0, 151.0))

    assert trial.outcome == "taken"
    assert trial.turns == LEAST_TURNS
    assert trial.ratio is not None
    assert trial.ratio.low < 1.5 < trial.ratio.high


def test_a_candidate_that_answers_less_is_refused_early() -> None:
    trial = tried(turns(80.0, 81.0))

    assert trial.outcome == "no gain"
    assert trial.turns == LEAST_TURNS


def test_a_gain_of_a_hundredth_is_none() -> None:
    assert tried(turns(101.0, 102.0, 100.0)).outcome == "no gain"


def test_what_is_not_clear_after_all_turns_is_not_taken() -> None:
    trial = tried(turns(50.0, 200.0))

    assert trial.outcome == "no gain"
    assert trial.turns == MOST_TURNS
    assert trial.note == "not clear after all turns"


def test_a_candidate_over_the_limit_of_latency_is_not_taken() -> None:
    assert tried(turns(200.0, p99_ms=50.0), max_p99_ms=20.0).outcome == "too slow"
    assert tried(turns(200.0, p99_ms=50.0), max_p99_ms=80.0).outcome == "taken"


def test_without_time_for_enough_turns_nothing_is_decided() -> None:
    trial = tried(turns(200.0), most=LEAST_TURNS - 1)

    assert trial.outcome == "out of time"
    assert trial.ratio is None


@given(st.lists(st.floats(min_value=-2, max_value=2), min_size=2, max_size=MOST_TURNS))
def test_an_interval_contains_its_ratio(logs: list[float]) -> None:
    ratio = ratio_of(logs)
    assert ratio.low <= ratio.value * (1 + 1e-9)
    assert ratio.value <= ratio.high * (1 + 1e-9)


def test_only_what_was_taken_is_kept() -> None:
    found = Search()
    found.add(Trial(changed="intra_op_threads", value=1, outcome="taken"))
    found.add(Trial(changed="inter_op_threads", value=1, outcome="no gain"))

    assert found.best == {"intra_op_threads": 1}
    assert len(found.trials) == 2


def test_candidates_grow_with_the_cores() -> None:
    threads = [value for name, value in candidates(8, examples_in_flight=8) if name == "intra_op_threads"]
    assert threads == [1, 2, 4, 8]


def test_two_batches_at_a_time_are_tried_where_there_is_a_core_for_each() -> None:
    assert ("concurrent_batches", 2) in candidates(2, examples_in_flight=8)
    assert ("concurrent_batches", 2) not in candidates(1, examples_in_flight=8)


@pytest.mark.parametrize(("in_flight", "sizes"), [(8, []), (64, []), (65, [64]), (256, [64]), (257, [64, 1024])])
def test_no_size_of_batches_is_tried_that_can_make_no_difference(in_flight: int, sizes: list[int]) -> None:
    found = [value for name, value in candidates(2, examples_in_flight=in_flight) if name == "max_batch_size"]
    assert found == sizes


@pytest.mark.parametrize(("other", "same"), [(0.5, True), (0.5 + 4e-7, True), (0.51, False), (math.nan, False)])
def test_scores_may_differ_by_rounding_alone(other: float, same: bool) -> None:  # noqa: FBT001 - a parameter
    usual = {"test": {"loss": 0.5, "odd": math.nan}}
    difference = scores_differ({"test": {"loss": other, "odd": math.nan}}, usual)
    assert (difference == "") is same
    assert same or "test/loss" in difference


def test_the_plot_of_a_ratio_has_one_in_the_middle() -> None:
    assert whisker(Ratio(value=2.0, low=1.9, high=2.0), width=5) == "  | o"
    assert whisker(Ratio(value=0.1, low=0.01, high=8.0), width=5) == "o----"
