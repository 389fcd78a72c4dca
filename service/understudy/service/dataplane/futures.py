"""Futures of the evaluator's, awaited on the event loop."""

from __future__ import annotations

import asyncio
from typing import Any


def abandon(future: asyncio.Future[Any]) -> None:
    """Take work back if it has not begun; how it ends no longer matters to anybody."""
    future.add_done_callback(_look_at)
    future.cancel()


def _look_at(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an exception that nobody asked for."""
    if not future.cancelled():
        future.exception()
