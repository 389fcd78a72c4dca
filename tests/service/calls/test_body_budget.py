"""What the messages of streams hold: how they wait for room, and that all of it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.calls import body_budget
from understudy.service.calls.body_budget import BodyBudget, BodyReservation, StreamReservation

SECONDS = 60
MIB = 1 << 20
MOST = 16 * MIB


@pytest.fixture
async def budget() -> BodyBudget:
    return BodyBudget(MOST)


async def holding(budget: BodyBudget, size: int) -> StreamReservation:
    """Return what a stream holds, of which a message of this many bytes has arrived."""
    stream = StreamReservation(budget)
    await stream.arrive(size)
    stream.complete(size)
    return stream


async def waiting(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Return a task that waits for room."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_message_waits_until_there_is_room(budget: BodyBudget) -> None:
    first = await holding(budget, 10 * MIB)
    second = StreamReservation(budget)
    task = await waiting(second.arrive(4 * MIB))
    first.release_oldest()
    await asyncio.wait_for(task, SECONDS)
    second.complete(4 * MIB)
    assert budget.held_bytes == 4 * MIB
    second.close()
    first.close()
    assert budget.held_bytes == 0


async def test_messages_get_room_in_the_order_of_arrival(budget: BodyBudget) -> None:
    first = await holding(budget, 11 * MIB)
    streams = [StreamReservation(budget) for _ in range(3)]
    tasks = [await waiting(stream.expect(6 * MIB)) for stream in streams]
    first.release_oldest()
    await asyncio.wait_for(asyncio.gather(*tasks[:2]), SECONDS)
    assert not tasks[2].done()
    streams[0].close()
    await asyncio.wait_for(tasks[2], SECONDS)


async def test_a_message_that_finds_no_room_in_time_is_refused(
    budget: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "ROOM_SECONDS", 0.01)
    await holding(budget, 10 * MIB)
    with pytest.raises(OverloadedError, match=r"10485760 of the 16777216 bytes of --max-body-mib") as refused:
        await StreamReservation(budget).arrive(4 * MIB)
    assert refused.value.retry_after_seconds > 0
    assert budget.held_bytes == 10 * MIB


async def test_messages_that_wait_in_memory_are_bounded_too(budget: BodyBudget) -> None:
    await holding(budget, 10 * MIB)
    task = await waiting(StreamReservation(budget).arrive(4 * MIB))
    with pytest.raises(OverloadedError, match="no room for 4194304 more;"):
        await StreamReservation(budget).arrive(4 * MIB)
    task.cancel()
    await asyncio.wait((task,), timeout=SECONDS)
    assert task.cancelled()
    assert budget.held_bytes == 10 * MIB
    await waiting(StreamReservation(budget).arrive(4 * MIB))


async def test_a_call_that_ends_while_it_waits_leaves_its_place(budget: BodyBudget) -> None:
    first = await holding(budget, 10 * MIB)
    leaving, staying = StreamReservation(budget), StreamReservation(budget)
    left = await waiting(leaving.arrive(5 * MIB))
    stayed = await waiting(staying.expect(3 * MIB))
    first.release_oldest()  # gives room to both, in the same round in which one is cancelled
    left.cancel()
    await asyncio.wait((left,), timeout=SECONDS)
    await asyncio.wait_for(stayed, SECONDS)
    assert left.cancelled()
    assert budget.held_bytes == 3 * MIB


async def test_small_messages_pass_large_ones_that_wait(budget: BodyBudget) -> None:
    await holding(budget, 12 * MIB)
    await waiting(StreamReservation(budget).expect(8 * MIB))
    await asyncio.wait_for(holding(budget, MIB), SECONDS)
    await asyncio.wait_for(holding(budget, MIB), SECONDS)
    await waiting(StreamReservation(budget).expect(MIB))


async def test_a_single_message_may_be_as_large_as_all(budget: BodyBudget) -> None:
    stream = await holding(budget, MOST)
    task = await waiting(stream.expect_another())
    stream.release_oldest()
    await asyncio.wait_for(task, SECONDS)
    await asyncio.wait_for(stream.arrive(MOST), SECONDS)


async def test_streams_leave_room_for_the_bodies_of_other_calls(budget: BodyBudget) -> None:
    await holding(budget, 12 * MIB)
    with BodyReservation(budget, None) as body:
        body.hold(4 * MIB)
        with pytest.raises(OverloadedError, match="--max-body-mib"):
            body.hold(4 * MIB + 1)


async def test_room_for_a_message_that_does_not_come_is_given_up(
    budget: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "EXPECTING_SECONDS", 0.01)
    quiet = StreamReservation(budget)
    await quiet.expect(12 * MIB)
    await quiet.arrive(MIB)
    await asyncio.wait_for(StreamReservation(budget).expect(8 * MIB), SECONDS)
    assert budget.held_bytes == 9 * MIB


async def test_messages_that_have_begun_do_not_wait_for_each_other(
    budget: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All would stop; instead one is refused, which makes room for the others and those that wait to begin."""
    monkeypatch.setattr(body_budget, "EXPECTING_SECONDS", 0.01)
    slow = [StreamReservation(budget) for _ in range(2)]
    for stream in slow:
        await stream.expect(6 * MIB)
        await stream.arrive(5 * MIB)
    probe = StreamReservation(budget)
    await asyncio.wait_for(probe.expect(3 * MIB // 2), SECONDS)  # no more room is kept for them
    probe.close()
    third = StreamReservation(budget)
    task = await waiting(third.expect(4 * MIB))
    await slow[0].arrive(8 * MIB)
    with pytest.raises(OverloadedError, match="--max-body-mib"):
        await slow[1].arrive(9 * MIB)
    slow[1].close()
    await asyncio.wait_for(task, SECONDS)
    slow[0].close()
    third.close()
    assert budget.held_bytes == 0


async def test_a_stream_that_may_have_no_other_message_is_not_refused_for_it(
    budget: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "ROOM_SECONDS", 0.01)
    stream = await holding(budget, 8 * MIB)
    await stream.expect_another()
    assert budget.held_bytes == 8 * MIB


async def test_a_decompressed_message_waits_for_the_room_that_it_needs_more(budget: BodyBudget) -> None:
    first, small = await holding(budget, 10 * MIB), await holding(budget, MIB)
    task = await waiting(small.grow(5 * MIB))
    first.close()
    await asyncio.wait_for(task, SECONDS)
    assert budget.held_bytes == 5 * MIB
    small.release_oldest()
    assert budget.held_bytes == 0


async def test_what_arrives_after_the_end_of_a_call_holds_nothing(budget: BodyBudget) -> None:
    stream = await holding(budget, MIB)
    stream.close()
    await stream.arrive(2 * MIB)
    stream.complete(2 * MIB)
    await stream.expect(3 * MIB)
    stream.close()
    assert budget.held_bytes == 0
