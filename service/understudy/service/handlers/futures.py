"""Futures of the evaluator's, awaited on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

_T = TypeVar("_T")


async def begun(executor: Executor, begin: Callable[[], Future[_T]]) -> asyncio.Future[_T]:
    """Begin work where beginning it may block; if the caller goes away meanwhile, take it back once it has begun."""
    beginning = asyncio.get_running_loop().run_in_executor(executor, begin)
    try:
        return asyncio.wrap_future(await asyncio.shield(beginning))
    except asyncio.CancelledError:
        beginning.add_done_callback(_take_back)
        raise


def abandon(future: asyncio.Future[Any]) -> None:
    """Take work back if it has not begun; how it ends no longer matters to anybody."""
    future.add_done_callback(_look_at)
    future.cancel()


def _take_back(beginning: asyncio.Future[Future[Any]]) -> None:
    if beginning.exception() is None:
        beginning.result().cancel()


def _look_at(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an exception that nobody asked for."""
    if not future.cancelled():
        future.exception()
