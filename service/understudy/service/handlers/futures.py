"""Awaits the evaluator's futures on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

_T = TypeVar("_T")


async def begun(executor: Executor, begin: Callable[[], Future[_T]]) -> asyncio.Future[_T]:
    """Start work on an executor, since starting may block; if the caller disconnects first, cancel the work."""
    beginning = asyncio.get_running_loop().run_in_executor(executor, begin)
    try:
        return asyncio.wrap_future(await asyncio.shield(beginning))
    except asyncio.CancelledError:
        beginning.add_done_callback(_take_back)
        raise


def abandon(future: asyncio.Future[Any]) -> None:
    """Cancel work that has not begun, and ignore its outcome."""
    future.add_done_callback(_look_at)
    future.cancel()


def _take_back(beginning: asyncio.Future[Future[Any]]) -> None:
    if beginning.exception() is None:
        beginning.result().cancel()


def _look_at(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
