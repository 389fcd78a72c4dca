"""The asyncio client's streams: iterates callers' items, writes requests, and matches responses to items.

When a server ends a call during a write, grpcio may replace the server's status with "Internal error from Core"
(https://github.com/grpc/grpc/issues/36066): temporarily, if the write fails before the status arrives, or permanently,
if it fails after. So `CallEnd` keeps the first status, and waits for a later one if the first is grpcio's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, TypeVar, cast

import grpc
from grpc import aio

from understudy.clients import responses
from understudy.clients.client_errors import UnderstudyError, error_of
from understudy.clients.pipelining import Exhausted, Mark, Outcome, Sent, Unsendable, ended_early
from understudy.v1 import prediction_pb2

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
    await _connected_or_ended(call)
    with suppress(asyncio.InvalidStateError):  # the call is over; its status says why
        async for message in messages:
            await call.write(message)
        await call.done_writing()


async def _connected_or_ended(call: aio.StreamUnaryCall[Message, Any]) -> None:
    """Wait for what the first write of grpcio waits for, which never comes once the call is cancelled."""
    connecting = asyncio.ensure_future(call.wait_for_connection())

    def stop(_: object) -> None:
        connecting.cancel()

    call.add_done_callback(stop)
    try:
        await asyncio.wait([connecting])
    finally:
        connecting.cancel()
    if not connecting.cancelled():
        connecting.exception()  # the call itself tells it


async def outcomes(
    call: aio.StreamStreamCall[prediction_pb2.PredictStreamRequest, prediction_pb2.PredictStreamResponse],
    items: AsyncGenerator[Item],
    build: Callable[[Item], Awaitable[prediction_pb2.PredictStreamRequest]],
    *,
    in_flight: int,
) -> AsyncGenerator[Outcome]:
    """Yield one outcome per item, in order, with at most ``in_flight`` unanswered requests."""
    marks: asyncio.Queue[Mark] = asyncio.Queue(maxsize=in_flight)

    def wake(_: object) -> None:
        with suppress(asyncio.QueueFull):  # then the reader is awake
            marks.put_nowait(Sent())

    end = CallEnd(call)
    call.add_done_callback(wake)
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
