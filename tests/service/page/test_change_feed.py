from __future__ import annotations

import asyncio
import time
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

    def look(self) -> dict[str, object]:
        self.looks += 1
        self.looked.notify_threadsafe()
        return {"one": self.state, "other": 0}


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(change_feed, "APART_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as executor:
        yield Site(executor)


async def following(changes: AsyncIterator[bool]) -> bool:
    async with asyncio.timeout(SECONDS):
        return await anext(changes)


async def test_an_open_page_hears_of_each_change_and_nothing_looks_without_one(site: Site) -> None:
    assert site.looks == 0
    with site.feed.place():
        changes = aiter(site.feed.changes())
        assert await following(changes)
        await following(changes)  # what the first look found
        before = {part: site.feed.generation(part) for part in ("one", "other")}
        site.state = 1
        site.recorded.notify()
        assert await following(changes)

    assert site.feed.generation("one") > before["one"]
    assert site.feed.generation("other") == before["other"]


async def test_what_was_not_looked_at_counts_as_changed_when_a_page_is_opened(site: Site) -> None:
    with site.feed.place():
        first = site.feed.generation("one")
    with site.feed.place():
        assert site.feed.generation("one") > first


async def test_a_page_is_not_updated_more_often_than_the_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_feed, "APART_SECONDS", 0.2)
    with site.feed.place():
        changes = aiter(site.feed.changes())
        await following(changes)
        began = time.monotonic()
        for _ in range(3):
            site.feed.note_change()
            assert await following(changes)

    assert time.monotonic() - began >= 3 * 0.2


async def test_there_are_no_more_streams_than_allowed_and_a_closed_one_gives_its_place_back(site: Site) -> None:
    with site.feed.place():
        with site.feed.place(), pytest.raises(OverloadedError, match="2 pages are open"), site.feed.place():
            pass
        with site.feed.place():
            pass


async def test_draining_ends_every_stream(site: Site) -> None:
    with site.feed.place():
        changes = aiter(site.feed.changes())
        await following(changes)
        site.readiness.start_draining()
        async with asyncio.timeout(SECONDS):
            rest = [change async for change in changes]

    assert len(rest) <= 2


async def test_a_stream_ends_by_itself_so_that_its_caller_is_checked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "STREAM_SECONDS", 1.0)
    monkeypatch.setattr(change_feed, "KEEP_ALIVE_SECONDS", 0.01)
    with site.feed.place():
        async with asyncio.timeout(SECONDS):
            changes = [change async for change in site.feed.changes()]

    assert False in changes
