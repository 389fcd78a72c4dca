"""The connection of the asyncio client, which belongs to one event loop at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from grpc import aio

from understudy.clients.client_errors import client_closed
from understudy.v1 import (
    evaluation_pb2_grpc,
    fleet_pb2_grpc,
    metrics_pb2_grpc,
    model_pb2_grpc,
    prediction_pb2_grpc,
)


class Stubs:
    """The stubs of every service on one channel."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel: Final = channel
        self.predictions: Final = prediction_pb2_grpc.PredictionServiceStub(channel)
        self.evaluations: Final = evaluation_pb2_grpc.EvaluationServiceStub(channel)
        self.models: Final = model_pb2_grpc.ModelServiceStub(channel)
        self.fleet: Final = fleet_pb2_grpc.FleetServiceStub(channel)
        self.metrics: Final = metrics_pb2_grpc.MetricsServiceStub(channel)


class AsyncConnection:
    """Connects in the event loop of the first call, and anew once that loop is closed. Not thread-safe.

    A channel of grpc.aio works in the loop that it was made in and in no other.

    Args:
        make_channel: Makes a channel in the running event loop.
    """

    def __init__(self, make_channel: Callable[[], aio.Channel]) -> None:
        self._make_channel = make_channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stubs: Stubs | None = None
        self.closed = False

    @property
    def stubs(self) -> Stubs:
        """The stubs for calls in the running event loop.

        Raises:
            CancelledError: The client was closed.
            RuntimeError: Another event loop uses the connection.
        """
        if self.closed:
            raise client_closed()
        running = asyncio.get_running_loop()
        if self._stubs is None or (self._loop is not running and self._is_left()):
            self._loop, self._stubs = running, Stubs(self._make_channel())
        if self._loop is not running:
            raise RuntimeError(
                "this AsyncClient is used by another event loop, which is not closed; create one client in each event "
                "loop, or use Client, which any thread may share"
            )
        return self._stubs

    async def close(self) -> None:
        """Close the channel and cancel its calls."""
        self.closed = True
        if self._stubs is not None and self._loop is asyncio.get_running_loop():
            await self._stubs.channel.close(None)

    def _is_left(self) -> bool:
        return self._loop is not None and self._loop.is_closed()
