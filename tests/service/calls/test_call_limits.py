"""When callers are asked after, and how calls end that nobody waits for."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref

import pytest

from understudy.service.calls.call_limits import FIRST_CHECK_SECONDS, LONGEST_PAUSE_SECONDS, DisconnectMonitor
from understudy.service.calls.status import DEADLINE_PASSED, SERVER_ENDED, Failure

SECONDS = 60


class Waiting:
    """A call that notes when it is asked after, and how it was ended."""

    def __init__(self, deadline: float | None = None) -> None:
        self.started = time.monotonic()
        self.deadline = deadline
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self.ended: asyncio.Queue[Failure] = asyncio.Queue()

    def poll(self) -> None:
        self.asked.put_nowait(time.monotonic() - self.started)

    def end(self, failure: Failure) -> None:
        self.ended.put_nowait(failure)


@pytest.fixture
async def monitor() -> DisconnectMonitor:
    return DisconnectMonitor()


async def test_a_call_is_asked_after_later_and_later(monitor: DisconnectMonitor) -> None:
    call = Waiting()
    monitor.enter(call)
    ages = [await asyncio.wait_for(call.asked.get(), SECONDS) for _ in range(8)]
    assert ages[0] >= FIRST_CHECK_SECONDS
    for age, later in itertools.pairwise(ages):
        assert later - age >= 0.9 * min(max(FIRST_CHECK_SECONDS, age / 4), LONGEST_PAUSE_SECONDS)


async def test_a_call_that_is_over_is_not_asked_after(monitor: DisconnectMonitor) -> None:
    over, waiting = Waiting(), Waiting()
    for call in (over, waiting):
        monitor.enter(call)
    monitor.leave(over)
    await asyncio.wait_for(waiting.asked.get(), SECONDS)
    assert over.asked.empty()


async def test_a_call_whose_deadline_passes_is_ended_and_not_before(monitor: DisconnectMonitor) -> None:
    call = Waiting(deadline=time.monotonic() + 0.15)
    monitor.enter(call)
    assert await asyncio.wait_for(call.ended.get(), SECONDS) is DEADLINE_PASSED
    assert call.deadline is not None
    assert time.monotonic() >= call.deadline


async def test_waiting_for_calls_ends_with_the_last_one(monitor: DisconnectMonitor) -> None:
    calls = [Waiting(), Waiting()]
    for call in calls:
        monitor.enter(call)
    alone = asyncio.create_task(monitor.until_alone(SECONDS))
    for call in calls:
        assert not alone.done()
        await asyncio.sleep(0)
        monitor.leave(call)
    await asyncio.wait_for(alone, SECONDS)
    assert all(call.ended.empty() for call in calls)


async def test_calls_that_outlast_the_wait_are_ended(monitor: DisconnectMonitor) -> None:
    call = Waiting()
    monitor.enter(call)
    await monitor.until_alone(0.01)
    assert call.ended.get_nowait() is SERVER_ENDED


async def test_a_call_is_let_go_of_as_soon_as_it_is_over(monitor: DisconnectMonitor) -> None:
    call = Waiting()
    gone = weakref.ref(call)
    monitor.enter(call)
    monitor.leave(call)
    del call
    assert gone() is None
