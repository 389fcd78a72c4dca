"""A small real server around handlers that tests script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from testkit.asgi_bridge import AsgiHandler
from understudy.service.calls.body_budget import BodyBudget
from understudy.service.calls.call_limits import DisconnectMonitor
from understudy.service.calls.compression import MessageDecompressor
from understudy.service.calls.methods import CallContext, Handler, Service, service
from understudy.service.calls.metrics import new_registry
from understudy.service.calls.served_call import ServedMethods, served_methods
from understudy.service.calls.status import Code
from understudy.service.envoy.asgi_app import GrpcAsgiApp
from understudy.service.grpcio.grpc_server import MethodHandlers
from understudy.service.handlers.status_handlers import HealthHandler
from understudy.service.readiness import Readiness
from understudy.service.services import PREDICTION, PREDICTS, health_service
from understudy.v1 import prediction_pb2, prediction_pb2_grpc

FRONT_ENDS = ("grpcio", "envoy")
MAX_MESSAGE_BYTES = 1 << 20
MAX_BODY_BYTES = 4 * MAX_MESSAGE_BYTES
PREDICTION_SERVICE = "understudy.v1.PredictionService"

Behavior = Callable[[Any], Awaitable[Any]]
_ServerInterceptor: Any = grpc.aio.ServerInterceptor  # generic in the stubs only


class ScriptedHandlers:
    """Answers each message with the result of a test's function."""

    def __init__(self) -> None:
        self.behave: Behavior = self._echo_step
        self.refusal: Exception | None = None

    def check_admission(self, call: CallContext) -> None:
        del call
        if self.refusal is not None:
            raise self.refusal

    async def predict(self, request: Any, call: CallContext) -> Any:
        del call
        return await self.behave(request)

    async def predict_stream(self, requests: Any, call: CallContext) -> AsyncGenerator[Any, None]:
        del call
        async for message in requests:
            response = await self.behave(message.request)
            yield prediction_pb2.PredictStreamResponse(response=response)

    def services(self, readiness: Readiness) -> list[Service]:
        """Return this service, and health."""
        health = HealthHandler(readiness, [PREDICTION_SERVICE])
        return [
            service(
                PREDICTION,
                {
                    "Predict": Handler(PREDICTS, self.predict, admit=self.check_admission),
                    "PredictStream": Handler(PREDICTS, self.predict_stream),
                },
            ),
            health_service(health),
        ]

    async def _echo_step(self, request: prediction_pb2.PredictRequest) -> prediction_pb2.PredictResponse:
        return prediction_pb2.PredictResponse(step=request.version.step)


class EndedInterceptor(_ServerInterceptor):  # type: ignore[misc]  # see above
    """Records that a call has ended on the server, which is after its caller knows."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = "_".join(
            "stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming)
        )
        proceed = getattr(handler, kind)

        async def answer(came: Any, context: Any) -> Any:
            try:
                return await proceed(came, context)
            finally:
                self.ended.put_nowait(handler_call_details.method)

        return getattr(grpc, f"{kind}_rpc_method_handler")(answer)


@dataclass
class ServerHarness:
    """A running server, a channel to it, and state that tests inspect."""

    channel: grpc.aio.Channel
    registry: CollectorRegistry
    readiness: Readiness
    handlers: ScriptedHandlers
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
async def running_harness(front_end: str, more: Sequence[Service] = ()) -> AsyncIterator[ServerHarness]:
    registry = new_registry()
    readiness = Readiness()
    handlers = ScriptedHandlers()
    services = [*handlers.services(readiness), *more]
    make = {"grpcio": _grpcio_server, "envoy": _bridged_server}[front_end]
    server, ended = make(served_methods(services, registry))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ServerHarness(channel=channel, registry=registry, readiness=readiness, handlers=handlers, ended=ended)
    await server.stop(None)


def _grpcio_server(methods: ServedMethods) -> tuple[grpc.aio.Server, asyncio.Queue[str]]:
    ended = EndedInterceptor()
    server = grpc.aio.server(interceptors=(ended,))
    server.add_generic_rpc_handlers(
        [MethodHandlers(methods, MessageDecompressor(MAX_MESSAGE_BYTES), BodyBudget(MAX_BODY_BYTES))]
    )
    return server, ended.ended


def _bridged_server(methods: ServedMethods) -> tuple[grpc.aio.Server, asyncio.Queue[str]]:
    ended: asyncio.Queue[str] = asyncio.Queue()
    server = grpc.aio.server()
    application = GrpcAsgiApp(methods, DisconnectMonitor(), MAX_MESSAGE_BYTES, max_body_bytes=MAX_BODY_BYTES)
    server.add_generic_rpc_handlers([AsgiHandler(application, ended)])
    return server, ended
