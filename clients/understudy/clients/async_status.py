"""Finds the server's status of an asyncio call that writes.

When a server ends a call during a write, grpcio may replace the server's status with "Internal error from Core"
(https://github.com/grpc/grpc/issues/36066): temporarily, if the write fails before the status arrives, or permanently,
if it fails after. So this module keeps the first status, and waits for a later one if the first is grpcio's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import grpc
from grpc import aio

from understudy.clients.client_errors import error_of

_MADE_UP: Final = "Internal error from Core"
_LONGEST_WAIT_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.005


class CallEnd:
    """Records how a call ends. Create it right after the call."""

    def __init__(self, call: aio.Call) -> None:
        self._call = call
        self._first: aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    @asynccontextmanager
    async def translated(self) -> AsyncIterator[None]:
        """Raise the error of `understudy.clients.client_errors` for the server's status."""
        try:
            yield
        except aio.AioRpcError as error:
            raise error_of(await self._real(error)) from error

    async def _real(self, error: aio.AioRpcError) -> grpc.RpcError:
        if not _is_made_up(error):
            return error
        if self._first is not None and not _is_made_up(self._first):
            return self._first
        for _ in range(int(_LONGEST_WAIT_SECONDS / _PAUSE_SECONDS)):
            await asyncio.sleep(_PAUSE_SECONDS)
            present = _status_now(self._call)
            if not _is_made_up(present):
                return present
        return error

    def _note(self, _: Any) -> None:
        self._first = _status_now(self._call)


def _is_made_up(error: aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _MADE_UP


def _status_now(call: aio.Call) -> aio.AioRpcError:
    """Return the status of a call that has ended."""
    return aio.AioRpcError(
        _result_now(call.code()),
        aio.Metadata(),
        _result_now(call.trailing_metadata()),
        _result_now(call.details()),
        None,
    )


def _result_now(coroutine: Any) -> Any:
    """Run a coroutine that does not suspend, and return its result."""
    try:
        cast("Coroutine[Any, None, Any]", coroutine).send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the call has not ended")
