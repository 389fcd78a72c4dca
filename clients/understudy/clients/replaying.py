"""Streams of batches that one version answers, apart from live requests."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import grpc
from grpc import aio

from understudy.clients import requests, responses
from understudy.clients.async_streams import CallEnd
from understudy.clients.client_errors import UnderstudyError, translated
from understudy.clients.pipelining import ended_early
from understudy.clients.types import PredictResult, ReplayedModel, Tensors
from understudy.v1 import evaluation_pb2


class Sending:
    """The messages of a stream that are sent when they are put: an iterator for gRPC's thread."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[evaluation_pb2.ReplayRequest | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[evaluation_pb2.ReplayRequest]:
        return iter(self._messages.get, None)

    def put(self, message: evaluation_pb2.ReplayRequest) -> None:
        """Send a message."""
        self._messages.put(message)

    def end(self) -> None:
        """Say that there are no more, which releases gRPC's thread."""
        self._messages.put(None)


class Replay:
    """A version that answers one batch after another. For one thread at a time; see `Client.replay`.

    Args:
        sending: Sends the batches.
        call: Receives the answers; the options are sent.

    Attributes:
        model: The version.
    """

    def __init__(self, sending: Sending, call: grpc.CallIterator[evaluation_pb2.ReplayResponse]) -> None:
        self._sending = sending
        self._answers: Final = iter(call)
        self.model = responses.replayed_model(self._next().model)
        self._names = requests.Names.of(self.model.inputs, self.model.outputs)

    def predict(self, inputs: Tensors) -> PredictResult:
        """Predict one batch, as `Client.predict` does."""
        self._sending.put(requests.replay_batch(inputs, self._names))
        return responses.replayed(self._next().answer, self.model.step)

    def finish(self) -> None:
        """Send no more batches, and wait until the server has released the version."""
        self._sending.end()
        with suppress(UnderstudyError):  # it is released all the same
            while True:
                self._next()

    def _next(self) -> evaluation_pb2.ReplayResponse:
        with translated():
            response = next(self._answers, None)
        if response is None:
            raise ended_early()
        return response


class AsyncReplay:
    """A version that answers one batch after another. For one task at a time; see `AsyncClient.replay`.

    Args:
        exchange: Sends the batches; the options are sent.
        model: The version.

    Attributes:
        model: The version.
    """

    def __init__(self, exchange: Exchange, model: ReplayedModel) -> None:
        self._exchange = exchange
        self.model = model
        self._names = requests.Names.of(model.inputs, model.outputs)

    async def predict(self, inputs: Tensors) -> PredictResult:
        """Predict one batch, as `AsyncClient.predict` does."""
        response = await self._exchange.answer_to(requests.replay_batch(inputs, self._names))
        return responses.replayed(response.answer, self.model.step)


class Exchange:
    """Sends one message of a Replay stream after another, and waits for the response to each.

    Args:
        call: The call, on which nothing was sent yet.
    """

    def __init__(self, call: aio.StreamStreamCall[evaluation_pb2.ReplayRequest, evaluation_pb2.ReplayResponse]) -> None:
        self._call = call
        self._end = CallEnd(call)

    async def answer_to(self, message: evaluation_pb2.ReplayRequest) -> evaluation_pb2.ReplayResponse:
        """Return the response to a message."""
        async with self._end.translated():
            await self._call.write(message)
            response = await self._call.read()
        if not isinstance(response, evaluation_pb2.ReplayResponse):
            raise ended_early()
        return response

    async def finish(self) -> None:
        """Send no more messages, and wait until the server has released the version."""
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):  # it is released all the same
            await self._call.done_writing()
            await self._call.read()
