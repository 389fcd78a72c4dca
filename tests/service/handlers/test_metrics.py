"""The handler of metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from understudy.service.handlers.status_handlers import MetricsHandler

SECONDS = 60


class CountedScrapes:
    """A collector whose scrapes take until they are let go."""

    def __init__(self) -> None:
        self.count = 0
        self.began = threading.Semaphore(0)
        self.go = threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.count += 1
        self.began.release()
        assert self.go.wait(SECONDS)
        yield GaugeMetricFamily("scrapes", "How many there were.", value=self.count)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


async def test_calls_that_arrive_during_a_scrape_share_the_next_one(executor: ThreadPoolExecutor) -> None:
    """Else a thousand calls for the metrics would take as many scrapes, tens of seconds, from other callers."""
    scrapes, registry = CountedScrapes(), CollectorRegistry()
    scrapes.go.set()
    registry.register(scrapes)
    before = scrapes.count
    scrapes.began = threading.Semaphore(0)
    scrapes.go.clear()
    handler = MetricsHandler(registry, executor=executor)
    first = asyncio.create_task(handler.exposition())
    assert await asyncio.to_thread(scrapes.began.acquire, timeout=SECONDS)
    later = [asyncio.create_task(handler.exposition()) for _ in range(100)]
    await asyncio.sleep(0)
    later[0].cancel()
    scrapes.go.set()
    texts = [(await call)[0].decode() for call in (first, *later[1:])]
    assert scrapes.count == before + 2
    assert f"scrapes {before + 1}" in texts[0]
    assert all(f"scrapes {before + 2}" in text for text in texts[1:])
