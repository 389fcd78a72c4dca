"""Those who look at a service for long: open pages, and a Prometheus."""

from __future__ import annotations

import asyncio
import html
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

SCRAPE_SECONDS = 5.0
JOIN_SECONDS = 30.0
_STREAM = re.compile(r'sse-connect="([^"]*)"')
_OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


async def follow_page(client: httpx.AsyncClient, counts: Counter[str]) -> None:
    """Do what the scripts of one open page do, until cancelled; count opened pages, events and the bytes of them."""
    page = await client.get("/")
    stream = html.unescape(_STREAM.findall(page.raise_for_status().text)[0])
    counts["open"] += 1
    while True:
        async with client.stream("GET", stream) as response:
            read = 0
            async for line in response.raise_for_status().aiter_lines():
                counts["events"] += line.startswith("event: ")
                counts["bytes"] += response.num_bytes_downloaded - read
                read = response.num_bytes_downloaded


async def scrape(client: httpx.AsyncClient, counts: Counter[str]) -> None:
    """Read the metrics every five seconds as Prometheus does, until cancelled; count the scrapes."""
    while True:
        (await client.get("/metrics", headers=_OPENMETRICS)).raise_for_status()
        counts["scrapes"] += 1
        await asyncio.sleep(SCRAPE_SECONDS)


@contextmanager
def watched(address: str) -> Iterator[Counter[str]]:
    """Keep a page of a service open and scrape it, on a thread, until the block ends; raise what went wrong."""
    counts: Counter[str] = Counter()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="onlookers")
    thread.start()

    async def look() -> None:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60.0) as client:
            await asyncio.gather(follow_page(client, counts), scrape(client, counts))

    looking = asyncio.run_coroutine_threadsafe(look(), loop)
    try:
        yield counts
    finally:
        if looking.cancel():
            with suppress(asyncio.CancelledError):
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result(JOIN_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(JOIN_SECONDS)
        loop.close()
    if not looking.cancelled():
        looking.result()
