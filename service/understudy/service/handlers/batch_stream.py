"""The messages of a client's stream: options, then batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from understudy.evaluator.evaluator_errors import InvalidInputError, StreamIdleError
from understudy.v1 import evaluation_pb2

Request = TypeVar("Request", evaluation_pb2.EvaluateRequest, evaluation_pb2.CompareRequest)


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """How long a stream may be idle, and how long it may last, in seconds."""

    idle_seconds: float
    total_seconds: float


class BatchStream(Generic[Request]):
    """The messages of one stream, with time limits. Read by one task at a time.

    Args:
        requests: Options or batches, in the ``oneof`` called ``message``.
        limits: The limits of the stream.
    """

    def __init__(self, requests: AsyncIterator[Request], limits: StreamLimits) -> None:
        self._requests: AsyncIterator[Request] = requests
        self._idle_seconds = limits.idle_seconds
        self._total_seconds = limits.total_seconds
        self._ends = time.monotonic() + limits.total_seconds
        self._first_batch: evaluation_pb2.EvaluateBatch | None = None

    async def first(self) -> Request | None:
        """Return the first message if it is options, else None. Call it first and only once.

        Raises:
            InvalidInputError: There is no message at all.
            StreamIdleError: The stream was idle for too long, or lasted too long.
        """
        message = await self._next()
        if message is None:
            raise InvalidInputError("the stream ended without a batch; send at least one")
        if message.WhichOneof("message") == "options":
            return message
        self._first_batch = _batch_of(message)
        return None

    async def batches(self) -> AsyncIterator[evaluation_pb2.EvaluateBatch]:
        """Yield the batches; see `next_batch`."""
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> evaluation_pb2.EvaluateBatch | None:
        """Return the next batch, or None at the end.

        Raises:
            InvalidInputError: Options are not the first message, or are sent twice.
            StreamIdleError: The stream was idle for too long, or lasted too long.
        """
        if self._first_batch is not None:
            batch, self._first_batch = self._first_batch, None
            return batch
        message = await self._next()
        return None if message is None else _batch_of(message)

    async def _next(self) -> Request | None:
        left = self._ends - time.monotonic()
        try:
            async with asyncio.timeout(min(self._idle_seconds, left)):
                return await anext(self._requests, None)
        except TimeoutError:
            if left <= self._idle_seconds:
                raise StreamIdleError(
                    f"the stream lasted longer than {self._total_seconds:g} s while it held a slot; score fewer "
                    "batches at once, or raise --stream-timeout-seconds"
                ) from None
            raise StreamIdleError(
                f"the stream was idle for {self._idle_seconds:g} s while it held a slot; start again, and send "
                "batches without such pauses"
            ) from None


def _batch_of(message: Request) -> evaluation_pb2.EvaluateBatch:
    kind = message.WhichOneof("message")
    if kind != "batch":
        came = "got options after the first message" if kind == "options" else "got an empty message"
        raise InvalidInputError(f"{came}; send options first or not at all, then batches")
    return message.batch
