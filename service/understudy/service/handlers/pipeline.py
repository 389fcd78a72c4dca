"""Predictions of a stream of requests: pipelined, answered in order, with independent failures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, TypeVar

from understudy.evaluator.types import Prediction
from understudy.service.calls.status import Failure, failure_of
from understudy.service.predictor import abandon

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Note = TypeVar("_Note")
_Begun = asyncio.Future[Prediction] | Failure


class StreamProtocol(Generic[_Request, _Note, _Response]):
    """Converts a protocol's messages into predictions and back.

    Args:
        note: Returns what the response needs from a request, so that the request itself can be released.
        begin: Starts a prediction; its error is the request's failure.
        answer: Builds the response; its error is the request's failure too.
        fail: Builds the response that reports a failure; never raises.
    """

    def __init__(
        self,
        *,
        note: Callable[[_Request], _Note],
        begin: Callable[[_Request], asyncio.Future[Prediction]],
        answer: Callable[[_Note, Prediction], _Response],
        fail: Callable[[_Note, Failure], _Response],
    ) -> None:
        self.note = note
        self._begin = begin
        self._answer = answer
        self._fail = fail

    def begin(self, request: _Request) -> _Begun:
        """Start a prediction, or return its failure."""
        try:
            return self._begin(request)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            return failure_of(error)

    async def response(self, note: _Note, begun: _Begun) -> _Response:
        """Wait for a prediction, and return the response for it or its failure."""
        if isinstance(begun, Failure):
            return self._fail(note, begun)
        try:
            return self._answer(note, await begun)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            return self._fail(note, failure_of(error))


async def predict_in_order(
    requests: AsyncIterator[_Request], protocol: StreamProtocol[_Request, _Note, _Response], *, depth: int
) -> AsyncGenerator[_Response, None]:
    """Answer every request in order, and read ahead while at most ``depth`` are unanswered."""
    pipeline: _Pipeline[_Note] = _Pipeline(depth)

    async def read() -> None:
        try:
            async for request in requests:
                pipeline.add(protocol.note(request), protocol.begin(request))
                if pipeline.is_full:
                    await pipeline.wait_for_room()
        finally:
            pipeline.end()

    reader = asyncio.create_task(read())
    try:
        while pipeline or await pipeline.wait_for_more():
            note, begun = pipeline.first
            yield await protocol.response(note, begun)
            pipeline.drop_first()
        await reader
    finally:
        reader.cancel()
        pipeline.cancel()


class _Pipeline(Generic[_Note]):
    """The unanswered requests of one stream, in order.

    Args:
        depth: The largest number of requests.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._begun: deque[tuple[_Note, _Begun]] = deque()
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def is_full(self) -> bool:
        return len(self._begun) >= self._depth

    @property
    def first(self) -> tuple[_Note, _Begun]:
        return self._begun[0]

    def add(self, note: _Note, begun: _Begun) -> None:
        self._begun.append((note, begun))
        self._more.set()

    def drop_first(self) -> None:
        self._begun.popleft()
        self._room.set()

    def end(self) -> None:
        """Mark the end: no more requests will be added."""
        self._ended = True
        self._more.set()

    async def wait_for_room(self) -> None:
        while self.is_full:
            self._room.clear()
            await self._room.wait()

    async def wait_for_more(self) -> bool:
        """Wait for a first request; return False if there will be none."""
        while not self._begun:
            if self._ended:
                return False
            self._more.clear()
            await self._more.wait()
        return True

    def cancel(self) -> None:
        """Cancel all unanswered requests."""
        for _, begun in self._begun:
            if isinstance(begun, asyncio.Future):
                abandon(begun)
