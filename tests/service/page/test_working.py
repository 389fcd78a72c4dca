from __future__ import annotations

import asyncio

import pytest
from starlette.responses import Response

from understudy.service.page import page_call
from understudy.service.page.page_call import Outcome, Progress, Working

SECONDS = 20.0
DONE = Outcome(response=Response(), html="done")


def test_the_time_left_is_that_of_the_rest_at_the_rate_since_the_first_report() -> None:
    now = [100.0]
    progress = Progress(lambda: now[0])
    progress.report(50, 250)
    now[0] += 2.0
    progress.report(150, 250)

    assert (progress.examples, progress.total, progress.remaining_seconds) == (150, 250, 2.0)


def test_the_time_left_is_not_known_before_the_second_report_or_without_a_total() -> None:
    one, endless = Progress(), Progress()
    one.report(50, 250)
    for examples in (50, 100):
        endless.report(examples, None)

    assert [progress.remaining_seconds for progress in (Progress(), one, endless)] == [None, None, None]


async def test_what_is_quick_is_done_at_once() -> None:
    async def work(_progress: Progress) -> Outcome:
        return DONE

    async with Working(work) as task:
        assert task.result() is DONE


async def test_a_line_comes_whenever_something_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_call, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(page_call, "TELL_SECONDS", 0.01)
    turns: asyncio.Queue[int] = asyncio.Queue()

    async def work(progress: Progress) -> Outcome:
        while (done := await turns.get()) < 3:
            progress.report(done, 3)
        return DONE

    async with asyncio.timeout(SECONDS):
        computing = Working(work)
        async with computing as task:
            said = []
            async for line in computing.lines(task, lambda progress: str(progress.examples)):
                said.append(line)
                turns.put_nowait(len(said))
            assert task.result() is DONE

    assert said == ["0", "1", "2"]


@pytest.mark.parametrize("quick_seconds", [0.0, SECONDS])
async def test_what_nothing_waits_for_any_more_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, quick_seconds: float
) -> None:
    monkeypatch.setattr(page_call, "QUICK_SECONDS", quick_seconds)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def work(_progress: Progress) -> Outcome:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return DONE

    async def wait() -> None:
        computing = Working(work)
        async with computing as task:
            async for _ in computing.lines(task, lambda _: ""):
                pass

    async with asyncio.timeout(SECONDS):
        waiting = asyncio.create_task(wait())
        await begun.wait()
        waiting.cancel()
        await asyncio.wait([waiting])

    assert waiting.cancelled()
    assert cancelled.is_set()
