from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.page import change_feed
from understudy.service.page.change_feed import ChangeFeed
from understudy.service.readiness import Notifier, Readiness

SECONDS = 20.0


class Site:
    """A feed, and what it looks at."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.state = 0
        self.looks = 0
        self.looked = Notifier()
        self.recorded = Notifier()
        self.readiness = Readiness()
        self.feed = ChangeFeed(
            self.look, recorded=self.recorded, readiness=self.readiness, executor=executor, max_streams=2
        )

    def look(self) -> int:
        self.looks += 1
        self.looked.notify_threadsafe()
        return self.state


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(change_feed, "APART_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as executor:
        yield Site(executor)


async def following(events: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(SECONDS):
        return await anext(events)


async def test_an_open_page_hears_of_each_change_and_nothing_looks_without_one(site: Site) -> None:
    assert site.looks == 0
    with site.feed.place():
        events = aiter(site.feed.events())
        first = await following(events)
        while site.looks == 0:
            await asyncio.wait_for(site.looked.subscribe().wait(), SECONDS)
        await following(events)  # what the first look found
        site.state = 1
        site.recorded.notify()
        changed = await following(events)

    assert first.endswith(b"event: changed\ndata: \n\n")
    assert changed == b"event: changed\ndata: \n\n"
    assert site.feed.generation == 2


async def test_there_are_no_more_streams_than_allowed_and_a_closed_one_gives_its_place_back(site: Site) -> None:
    with site.feed.place():
        with site.feed.place(), pytest.raises(OverloadedError, match="2 pages are open"), site.feed.place():
            pass
        with site.feed.place():
            pass


async def test_draining_ends_every_stream(site: Site) -> None:
    with site.feed.place():
        events = aiter(site.feed.events())
        await following(events)
        site.readiness.start_draining()
        async with asyncio.timeout(SECONDS):
            rest = [event async for event in events]

    assert len(rest) <= 2


async def test_a_stream_ends_by_itself_so_that_its_caller_is_checked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "STREAM_SECONDS", 0.05)
    monkeypatch.setattr(change_feed, "KEEP_ALIVE_SECONDS", 0.01)
    with site.feed.place():
        async with asyncio.timeout(SECONDS):
            events = [event async for event in site.feed.events()]

    assert b": open\n\n" in events
