"""Writes a line about every call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from understudy.service.dataplane.codes import Code
from understudy.service.grpcio.interceptors.base import AroundInterceptor, Context
from understudy.service.grpcio.status import code_of, code_when_cancelled, message_of

_log = structlog.get_logger(__name__)


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
            log = _log.debug if code is Code.OK else _log.info
            seconds = time.perf_counter() - started
            log("call ended", method=path, code=code.name, message=message_of(context), seconds=seconds)
