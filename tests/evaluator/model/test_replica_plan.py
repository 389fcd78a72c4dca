"""Batches are shared out by what launching and computing cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.model.replica_forward import ReplicaPlan


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (10, (1, 2, 4, 8, 10)), (3, (1, 2, 3))]
)
def test_sizes_are_powers_of_two_and_the_largest(max_batch_size: int, sizes: tuple[int, ...]) -> None:
    assert ReplicaPlan(2, max_batch_size).sizes == sizes


@given(replicas=st.integers(1, 8), max_batch_size=st.integers(1, 70), data=st.data(), seconds=st.floats(1e-6, 1.0))
def test_shares_are_the_whole_batch_in_order_on_different_replicas(
    replicas: int, max_batch_size: int, data: st.DataObject, seconds: float
) -> None:
    plan = ReplicaPlan(replicas, max_batch_size)
    if data.draw(st.booleans()):
        for size in plan.sizes:
            plan.observe(size, launch_seconds=1e-4, seconds=seconds * size)
    largest = data.draw(st.sampled_from(plan.sizes))
    rows = data.draw(st.integers(1, plan.most_examples(largest)))
    shares = plan.shares(rows, largest)
    assert [place for share in shares for place in range(share.start, share.stop)] == list(range(rows))
    assert len({share.replica for share in shares}) == len(shares)
    for share in shares:
        assert share.size in plan.sizes
        assert share.size <= plan.largest_share(rows, largest) <= largest
        assert 0 < share.stop - share.start <= share.size


@pytest.mark.parametrize(("size", "smaller"), [(10, 4), (8, 4), (4, 2), (2, 1), (1, 0)])
def test_the_size_to_try_after_one_that_did_not_fit_is_at_most_half(size: int, smaller: int) -> None:
    assert ReplicaPlan(2, 10).smaller_size(size) == smaller


def test_a_batch_that_one_replica_has_no_memory_for_goes_to_several() -> None:
    plan = ReplicaPlan(4, 64)
    for size in plan.sizes:
        plan.observe(size, launch_seconds=1.0, seconds=1.0)
    assert [len(plan.shares(64, largest)) for largest in (64, 32, 16)] == [1, 2, 4]


def test_a_batch_goes_to_as_few_replicas_as_are_soonest_done() -> None:
    plan = ReplicaPlan(4, 64)
    for size in plan.sizes:
        plan.observe(size, launch_seconds=1e-3, seconds=2e-3 + size * 1e-4)
    assert [len(plan.shares(rows, 64)) for rows in (1, 8, 16, 64)] == [1, 1, 1, 2]
    assert [len(plan.shares(rows, 64)) for rows in (65, 128, 256)] == [3, 4, 4]


def test_small_batches_take_turns() -> None:
    plan = ReplicaPlan(3, 8)
    plan.observe(8, launch_seconds=1.0, seconds=1.0)
    assert [plan.shares(1, 8)[0].replica for _ in range(5)] == [0, 1, 2, 0, 1]
