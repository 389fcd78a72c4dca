"""A manager of servables whose loading tests control."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testkit.text_lifecycle import TextLifecycle
from testkit.watcher_harness import WatcherHarness


@pytest.fixture
def make_lifecycle(tmp_path: Path) -> Iterator[Callable[..., TextLifecycle]]:
    with contextlib.ExitStack() as stack:

        def make(kind: type[TextLifecycle] = TextLifecycle, **options: int) -> TextLifecycle:
            lifecycle = kind(tmp_path, **options)
            stack.callback(lifecycle.close)
            return lifecycle

        yield make


@pytest.fixture
def lifecycle(make_lifecycle: Callable[..., TextLifecycle]) -> TextLifecycle:
    lifecycle = make_lifecycle()
    lifecycle.manager.start()
    return lifecycle


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[Callable[..., WatcherHarness]]:
    harnesses: list[WatcherHarness] = []

    def make(folder: Path = tmp_path, **options: object) -> WatcherHarness:
        harnesses.append(WatcherHarness(folder, **options))  # type: ignore[arg-type] # passed through
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.close()


@pytest.fixture
def harness(make_harness: Callable[..., WatcherHarness]) -> WatcherHarness:
    return make_harness()
