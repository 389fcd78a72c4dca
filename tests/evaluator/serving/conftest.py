"""A manager of servables whose loading tests control."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testkit.text_lifecycle import WAIT_SECONDS, TextLifecycle
from testkit.watcher_harness import WatcherHarness


@pytest.fixture
def lifecycle(tmp_path: Path) -> Iterator[TextLifecycle]:
    lifecycle = TextLifecycle(tmp_path)
    lifecycle.manager.start()
    yield lifecycle
    lifecycle.may_load.set()
    lifecycle.manager.close(WAIT_SECONDS)


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[Callable[..., WatcherHarness]]:
    harnesses: list[WatcherHarness] = []

    def make(**options: object) -> WatcherHarness:
        harnesses.append(WatcherHarness(tmp_path, **options))  # type: ignore[arg-type] # passed through
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.close()


@pytest.fixture
def harness(make_harness: Callable[..., WatcherHarness]) -> WatcherHarness:
    return make_harness()
