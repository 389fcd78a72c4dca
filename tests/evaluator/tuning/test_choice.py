"""Which settings are chosen for what calls cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE
from understudy.evaluator.tuning.choice import (
    LONGEST_CALL_SECONDS,
    MIN_GAIN,
    SIZES,
    CallCost,
    FoundSettings,
    Measurement,
    Threads,
    choose,
    gain,
    gain_of_two,
)

CORES = 2
MILLISECOND = 1e-3
ONE_THREAD = Threads(intra_op=1)


def measured(
    threads: Threads, *, fixed: float, each: float, used_cores: float = 1.0, sizes: tuple[int, ...] = SIZES
) -> Measurement:
    """Return the measurement of a model whose calls take ``fixed + each * examples`` seconds."""
    walls = {size: fixed + each * size for size in sizes}
    calls = {size: CallCost(wall_seconds=wall, cpu_seconds=used_cores * wall) for size, wall in walls.items()}
    return Measurement(threads=threads, calls=calls)


def test_threads_that_only_cost_cpu_time_are_not_used() -> None:
    usual = measured(Threads(), fixed=100e-6, each=4e-6, used_cores=2.0)
    alone = measured(ONE_THREAD, fixed=100e-6, each=5e-6, used_cores=1.0)

    assert choose([usual, alone], cores=CORES).threads == ONE_THREAD


def test_threads_that_shorten_long_calls_are_used() -> None:
    usual = measured(Threads(), fixed=MILLISECOND, each=MILLISECOND, used_cores=2.0)
    alone = measured(ONE_THREAD, fixed=2 * MILLISECOND, each=2 * MILLISECOND, used_cores=1.0)

    assert choose([usual, alone], cores=CORES).threads == Threads()


def test_a_small_gain_changes_no_threads() -> None:
    usual = measured(Threads(), fixed=10 * MILLISECOND, each=MILLISECOND)
    better = measured(ONE_THREAD, fixed=10 * MILLISECOND / 1.04, each=MILLISECOND / 1.04)
    much_better = measured(ONE_THREAD, fixed=10 * MILLISECOND / 1.2, each=MILLISECOND / 1.2)

    assert choose([usual, better], cores=CORES).threads == Threads()
    assert choose([usual, much_better], cores=CORES).threads == ONE_THREAD


@pytest.mark.parametrize(
    ("fixed", "each", "expected"),
    [
        (MILLISECOND, 1e-6, 1024),  # more examples cost next to nothing
        (0.0, 10e-6, 256),  # the handover of a batch is worth a small share of the examples
        (0.0, MILLISECOND, 32),  # each example costs the same
        (50 * MILLISECOND, 0.5 * MILLISECOND, 64),  # 128 would take more than the longest call
        (0.0, 50 * MILLISECOND, 32),  # every batch is long
    ],
)
def test_the_largest_batch_is_the_smallest_that_gains_nothing_by_growing(
    fixed: float, each: float, expected: int
) -> None:
    assert choose([measured(Threads(), fixed=fixed, each=each)], cores=CORES).max_batch_size == expected


def test_batches_wait_for_company_only_if_a_call_costs_much_whatever_its_size() -> None:
    costly = measured(Threads(), fixed=4 * MILLISECOND, each=0.1 * MILLISECOND)
    steep = measured(Threads(), fixed=0.0, each=4 * MILLISECOND)
    brief = measured(Threads(), fixed=0.5 * MILLISECOND, each=1e-6)

    assert choose([costly], cores=CORES).gathering_seconds == pytest.approx(2 * MILLISECOND)
    assert choose([steep], cores=CORES).gathering_seconds == 0.0
    assert choose([brief], cores=CORES).gathering_seconds == 0.0


STEADY = (0.99, 1.0, 1.01, 1.0, 1.01, 0.99)


def with_gains(one: Measurement, *gains: float, turns: tuple[float, ...] = STEADY) -> Measurement:
    """Return a measurement in which two batches at a time answered so many times as much with each load."""
    return replace(one, gains_of_two=[[gain * turn for turn in turns] for gain in gains])


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((1.0, 1.1, 1.0, 1.5), 2),
        ((1.0, 1.0, 1.0, 1.1), 1),
        ((0.9, 1.0, 1.0, 1.6), 1),
        ((0.96, 1.2, 1.2, 1.2), 2),
        ((), 1),
    ],
)
def test_two_batches_run_at_the_same_time_if_they_gain_over_all_loads_and_lose_with_none(
    gains: tuple[float, ...], expected: int
) -> None:
    usual = measured(Threads(), fixed=0.0, each=MILLISECOND)

    found = choose([with_gains(usual, *gains)], cores=CORES)

    assert (found.concurrent_batches, found.threads) == (expected, Threads())


def test_a_gain_that_may_be_chance_does_not_count() -> None:
    usual = measured(Threads(), fixed=0.0, each=MILLISECOND)
    uneven = (0.5, 2.0, 0.7, 1.6, 1.2, 0.9)

    assert gain_of_two(with_gains(usual, 1.2, 1.3)) == pytest.approx(math.sqrt(1.2 * 1.3), rel=1e-3)
    assert gain_of_two(with_gains(usual, 1.2, 1.3, turns=uneven)) == 1.0


def test_one_thread_for_each_of_two_batches_is_chosen_with_them() -> None:
    usual = measured(Threads(), fixed=100e-6, each=100e-6, used_cores=1.8)
    alone = measured(ONE_THREAD, fixed=110e-6, each=110e-6)
    assert choose([usual, alone], cores=CORES).threads == Threads()

    found = choose([usual, with_gains(alone, 1.6)], cores=CORES)

    assert (found.threads, found.concurrent_batches) == (ONE_THREAD, 2)


def costs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Mapping[int, CallCost]:
    seconds = st.floats(min_value=1e-6, max_value=2.0)
    sizes = SIZES[: draw(st.integers(min_value=1, max_value=len(SIZES)))]
    return {size: CallCost(wall_seconds=draw(seconds), cpu_seconds=draw(seconds)) for size in sizes}


def gains(draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[list[float]]:
    ratios = st.lists(st.floats(min_value=0.1, max_value=10.0), min_size=6, max_size=6)
    return draw(st.lists(ratios, max_size=4))  # type: ignore[no-any-return]


@given(st.data())
def test_whatever_is_measured_the_choice_is_one_of_the_candidates_and_within_bounds(data: st.DataObject) -> None:
    threads = [Threads(), ONE_THREAD, Threads(intra_op=1, inter_op=1)]
    measurements = [Measurement(threads=one, calls=costs(data.draw), gains_of_two=gains(data.draw)) for one in threads]

    found = choose(measurements, cores=data.draw(st.integers(min_value=1, max_value=64)))

    assert found.threads in threads
    assert found.concurrent_batches in {1, 2}
    assert found.max_batch_size in SIZES
    assert 0.0 <= found.gathering_seconds <= 0.005
    chosen = measurements[threads.index(found.threads)]
    if found.max_batch_size > 32:
        assert chosen.calls[found.max_batch_size].wall_seconds <= LONGEST_CALL_SECONDS


@given(st.data())
def test_a_measurement_gains_nothing_over_itself(data: st.DataObject) -> None:
    one = Measurement(threads=Threads(), calls=costs(data.draw))

    assert gain(one, one, cores=CORES) == pytest.approx(1.0)
    assert gain(one, one, cores=CORES) < MIN_GAIN


def test_without_a_trial_the_settings_are_the_usual_ones() -> None:
    assert FoundSettings().max_batch_size == DEFAULT_MAX_BATCH_SIZE
    assert FoundSettings().threads == Threads()
