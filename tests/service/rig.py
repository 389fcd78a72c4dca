"""A small real server around a servicer that does what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry

from understudy.service.dataplane.codes import Code
from understudy.service.grpcio.health import HealthServicer
from understudy.service.grpcio.interceptors.access_log import AccessLogInterceptor
from understudy.service.grpcio.interceptors.base import AroundInterceptor, Context
from understudy.service.grpcio.interceptors.decoding import DecodingInterceptor
from understudy.service.grpcio.interceptors.errors import ErrorInterceptor
from understudy.service.grpcio.interceptors.metrics import MetricsInterceptor
from understudy.service.grpcio.interceptors.request_ids import RequestIdInterceptor
from understudy.service.grpcio.server import OBSERVED_SERVICES
from understudy.service.metrics.registry import new_registry
from understudy.service.metrics.rpc import RpcMetrics, methods_of
from understudy.service.readiness import Readiness
from understudy.v1 import prediction_pb2, prediction_pb2_grpc

PREDICTION_SERVICE = "understudy.v1.PredictionService"

Behavior = Callable[[Any], Awaitable[Any]]


class ToldServicer(prediction_pb2_grpc.PredictionServiceServicer):
    """Answers each message with what a test's function makes of it."""

    def __init__(self) -> None:
        self.behave: Behavior = self._echo_step

    async def Predict(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        return await self.behave(request)

    async def PredictStream(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        del context
        async for message in request_iterator:
            response = await self.behave(message.request)
            yield prediction_pb2.PredictStreamResponse(response=response)

    async def _echo_step(self, request: prediction_pb2.PredictRequest) -> prediction_pb2.PredictResponse:
        return prediction_pb2.PredictResponse(step=request.version.step)


class EndedInterceptor(AroundInterceptor):
    """Notes that a call has ended for the server, which is after its caller knows."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    @contextmanager
    def around(self, path: str, context: Context) -> Iterator[None]:
        del context
        try:
            yield
        finally:
            self.ended.put_nowait(path)


@dataclass
class Rig:
    """A running server, a channel to it, and what a test looks into."""

    channel: grpc.aio.Channel
    registry: CollectorRegistry
    readiness: Readiness
    servicer: ToldServicer
    ended: asyncio.Queue[str]

    @property
    def stub(self) -> Any:
        return prediction_pb2_grpc.PredictionServiceStub(self.channel)

    def handled(self, method: str, code: Code) -> float | None:
        rpc_type = "bidi_stream" if method == "PredictStream" else "unary"
        return self.registry.get_sample_value(
            "grpc_server_handled_total",
            {
                "grpc_type": rpc_type,
                "grpc_service": PREDICTION_SERVICE,
                "grpc_method": method,
                "grpc_code": code.label,
            },
        )


@asynccontextmanager
async def running_rig() -> AsyncIterator[Rig]:
    registry = new_registry()
    readiness = Readiness()
    servicer = ToldServicer()
    ended = EndedInterceptor()
    methods = [method for service in OBSERVED_SERVICES for method in methods_of(service)]
    server = grpc.aio.server(
        interceptors=(
            ended,
            MetricsInterceptor(RpcMetrics(registry, methods)),
            RequestIdInterceptor(),
            AccessLogInterceptor(),
            ErrorInterceptor(),
            DecodingInterceptor(),
        )
    )
    prediction_pb2_grpc.add_PredictionServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(readiness, [PREDICTION_SERVICE]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Rig(channel=channel, registry=registry, readiness=readiness, servicer=servicer, ended=ended.ended)
    await server.stop(None)
