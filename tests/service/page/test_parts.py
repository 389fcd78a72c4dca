from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from understudy.service.page import change_feed
from understudy.service.page.change_feed import ChangeFeed
from understudy.service.page.parts import Part, PlainStream, SharedParts, state_of
from understudy.service.readiness import Notifier, Readiness

SECONDS = 20.0
PAGES = 50


class Site:
    """Parts of one text and of a constant, and how often each was rendered."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.text = "before"
        self.rendered = {"text": 0, "constant": 0}
        self.readiness = Readiness()
        self.feed = ChangeFeed(
            lambda: {"text": self.text, "constant": 0},
            recorded=Notifier(),
            readiness=self.readiness,
            executor=executor,
            max_streams=PAGES,
        )
        self.shared = SharedParts(self.feed, executor)
        self.parts = [
            Part(name="text", key=("text",), render=lambda: self.render("text", self.text)),
            Part(name="constant", key=("constant",), render=lambda: self.render("constant", "same")),
        ]

    def render(self, part: str, content: str) -> str:
        self.rendered[part] += 1
        return f"<p>\n{content}</p>"

    async def shown(self) -> str:
        return state_of([await self.shared.get(part) for part in self.parts])

    async def news(self, events: AsyncIterator[bytes]) -> str:
        """Return the next event with parts."""
        async with asyncio.timeout(SECONDS):
            while not (event := await anext(events)).startswith(b"event: "):
                pass
        return event.decode()


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(change_feed, "APART_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as executor:
        yield Site(executor)


async def test_a_change_is_rendered_once_for_all_pages_and_sent_to_each(site: Site) -> None:
    with site.feed.place():
        seen = await site.shown()
        pages = [aiter(site.shared.events(site.parts, seen, PlainStream())) for _ in range(PAGES)]
        waiting = [asyncio.create_task(site.news(page)) for page in pages]
        await asyncio.sleep(0)
        before = site.rendered["text"]
        site.text = "after"
        events = await asyncio.gather(*waiting)

    assert site.rendered["text"] <= before + 2  # and for the look at the start, which a slow machine makes later
    assert set(events) == {events[0]}
    assert events[0].startswith("event: text\ndata: <p>\ndata: after</p>\n\nid: ")
    assert "event: constant" not in events[0]


async def test_nothing_is_sent_to_a_page_that_shows_the_present_state(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "STREAM_SECONDS", 2.0)
    monkeypatch.setattr(change_feed, "KEEP_ALIVE_SECONDS", 0.05)
    with site.feed.place():
        async with asyncio.timeout(SECONDS):
            events = [event async for event in site.shared.events(site.parts, await site.shown(), PlainStream())]

    assert {events[0], events[-1], *events} == {b"retry: 3000\n\n", b": open\n\n", b"retry: 100\n\n"}


async def test_a_page_that_comes_back_gets_only_what_it_has_missed(site: Site) -> None:
    with site.feed.place():
        events = aiter(site.shared.events(site.parts, "", PlainStream()))
        first = await site.news(events)
    seen = first.rpartition("id: ")[2].strip()
    site.text = "missed"
    with site.feed.place():
        again = await site.news(aiter(site.shared.events(site.parts, seen, PlainStream())))

    assert "event: text" in first
    assert "event: constant" in first
    assert "data: missed" in again
    assert "event: constant" not in again


async def test_a_page_that_reads_slowly_skips_states_and_nothing_is_rendered_for_it_meanwhile(site: Site) -> None:
    with site.feed.place():
        events = aiter(site.shared.events(site.parts, await site.shown(), PlainStream()))
        assert await anext(events) == b"retry: 3000\n\n"
        rendered = site.rendered["text"]
        for number in range(100):
            site.text = f"state {number}"
            site.feed.note_change()
        assert site.rendered["text"] == rendered
        event = await site.news(events)

    assert "data: state 99" in event


async def test_a_page_that_the_service_ends_by_draining_does_not_return_at_once(site: Site) -> None:
    with site.feed.place():
        events = aiter(site.shared.events(site.parts, "", PlainStream()))
        await site.news(events)
        site.readiness.start_draining()
        async with asyncio.timeout(SECONDS):
            rest = [event async for event in events]

    assert b"retry: 100\n\n" not in rest
