"""Knows which calls are still under way, so that draining ends as soon as the last one has."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from understudy.service.grpcio.interceptors.base import AroundInterceptor, Context


class InFlightInterceptor(AroundInterceptor):
    """Counts calls under way. Belongs to the event loop's thread.

    Args:
        endless: Paths of methods that last until the caller goes away, and so are not waited for.
    """

    def __init__(self, endless: Collection[str]) -> None:
        super().__init__()
        self._endless = frozenset(endless)
        self._calls = 0
        self._none = asyncio.Event()
        self._none.set()

    async def wait_for_none(self) -> None:
        """Wait until no call is under way."""
        await self._none.wait()

    @contextmanager
    def around(self, path: str, context: Context) -> Iterator[None]:
        """See `AroundInterceptor`."""
        del context
        if path in self._endless:
            yield
            return
        self._calls += 1
        self._none.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._none.set()
