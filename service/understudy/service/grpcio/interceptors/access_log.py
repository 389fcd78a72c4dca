"""Writes a line about every call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from understudy.service.access_log import call_ended
from understudy.service.grpcio.interceptors.base import AroundInterceptor, Context
from understudy.service.grpcio.status import code_of, code_when_cancelled, message_of


class AccessLogInterceptor(AroundInterceptor):
    """Logs calls that end well at level debug, since there may be thousands a second, and others at level info."""

    @contextmanager
    def around(self, path: str, context: Context) -> Iterator[None]:
        """See `AroundInterceptor`."""
        started = time.perf_counter()
        cancelled = False
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            cancelled = True
            raise
        finally:
            code = code_when_cancelled(context) if cancelled else code_of(context)
            call_ended(path, code, message=message_of(context), seconds=time.perf_counter() - started)
