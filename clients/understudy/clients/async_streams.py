"""The asyncio client's streams: iterates callers' items, writes requests, and matches responses to items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from grpc import aio

from understudy.clients import responses
from understudy.clients.async_status import CallEnd
from understudy.clients.client_errors import UnderstudyError
from understudy.clients.pipelining import Exhausted, Mark, Outcome, Sent, Unsendable, ended_early
from understudy.v1 import prediction_pb2

Item = TypeVar("Item")
Message = TypeVar("Message")

_END: Final = object()


async def drawn(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncGenerator[Item]:
    """Yield items; iterate a synchronous iterable on a thread, since it may block."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    iterator = iter(items)
    while (next_item := await asyncio.to_thread(next, iterator, _END)) is not _END:
        yield next_item  # type: ignore[misc]


async def write_all(call: aio.StreamUnaryCall[Message, Any], messages: AsyncIterable[Message]) -> None:
    """Write messages as fast as the server accepts them; stop when the call ends."""
    with suppress(asyncio.InvalidStateError):  # the call is over; its status says why
        async for message in messages:
            await call.write(message)
        await call.done_writing()


async def outcomes(
    call: aio.StreamStreamCall[prediction_pb2.PredictStreamRequest, prediction_pb2.PredictStreamResponse],
    items: AsyncGenerator[Item],
    build: Callable[[Item], Awaitable[prediction_pb2.PredictStreamRequest]],
    *,
    in_flight: int,
) -> AsyncGenerator[Outcome]:
    """Yield one outcome per item, in order, with at most ``in_flight`` unanswered requests."""
    marks: asyncio.Queue[Mark] = asyncio.Queue(maxsize=in_flight)

    def look(_: object) -> None:
        with suppress(asyncio.QueueFull):  # then the reader is awake
            marks.put_nowait(Sent())

    end = CallEnd(call)
    call.add_done_callback(look)
    writer = asyncio.create_task(_write_requests(call, items, build, marks))
    try:
        async for outcome in _read_outcomes(call, marks, end):
            yield outcome
    finally:
        writer.cancel()
        await asyncio.wait([writer])


async def _write_requests(
    call: aio.StreamStreamCall[prediction_pb2.PredictStreamRequest, prediction_pb2.PredictStreamResponse],
    items: AsyncGenerator[Item],
    build: Callable[[Item], Awaitable[prediction_pb2.PredictStreamRequest]],
    marks: asyncio.Queue[Mark],
) -> None:
    try:
        async with aclosing(items):
            async for item in items:
                try:
                    request = await build(item)
                except UnderstudyError as error:
                    await marks.put(Unsendable(error))
                    continue
                await marks.put(Sent())
                await call.write(request)
        await call.done_writing()
    except (aio.AioRpcError, asyncio.InvalidStateError):
        return  # the call is over; the reader gets its status
    except Exception as error:  # noqa: BLE001 - raised again in the caller's task
        await marks.put(Exhausted(error))
    else:
        await marks.put(Exhausted())


async def _read_outcomes(
    call: aio.StreamStreamCall[prediction_pb2.PredictStreamRequest, prediction_pb2.PredictStreamResponse],
    marks: asyncio.Queue[Mark],
    end: CallEnd,
) -> AsyncGenerator[Outcome]:
    while True:
        match await marks.get():
            case Unsendable(error):
                yield error
            case Exhausted(error):
                if error is not None:
                    raise error
                return
            case Sent():
                async with end.translated():
                    answer = await call.read()
                if not isinstance(answer, prediction_pb2.PredictStreamResponse):
                    raise ended_early()
                yield responses.streamed_prediction(answer)
