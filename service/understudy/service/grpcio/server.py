"""Assembles the grpc.aio server: ports, interceptors, services, and how it ends."""

from __future__ import annotations

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from prometheus_client import CollectorRegistry

from understudy.oip import inference_pb2, inference_pb2_grpc
from understudy.service.dataplane.planes import DataPlane
from understudy.service.errors import PortInUseError
from understudy.service.grpcio.health import HealthServicer
from understudy.service.grpcio.interceptors.access_log import AccessLogInterceptor
from understudy.service.grpcio.interceptors.decoding import DecodingInterceptor
from understudy.service.grpcio.interceptors.errors import ErrorInterceptor
from understudy.service.grpcio.interceptors.metrics import MetricsInterceptor
from understudy.service.grpcio.interceptors.request_ids import RequestIdInterceptor
from understudy.service.grpcio.oip import InferenceServicer
from understudy.service.grpcio.servicers import (
    EvaluationServicer,
    MetricsServicer,
    ModelServicer,
    PredictionServicer,
)
from understudy.service.metrics.rpc import RpcMetrics, methods_of
from understudy.service.readiness import Readiness
from understudy.v1 import (
    evaluation_pb2,
    evaluation_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prediction_pb2,
    prediction_pb2_grpc,
)

OWN_SERVICES: tuple[ServiceDescriptor, ...] = (
    prediction_pb2.DESCRIPTOR.services_by_name["PredictionService"],
    evaluation_pb2.DESCRIPTOR.services_by_name["EvaluationService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    metrics_pb2.DESCRIPTOR.services_by_name["MetricsService"],
)
"""The services of understudy.v1."""

_INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

_HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
OBSERVED_SERVICES = (*OWN_SERVICES, _INFERENCE, _HEALTH, reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"])
"""Every service on the port, whose calls are counted, but for TensorFlow Serving's, whose messages load TensorFlow."""

MIN_PING_SECONDS = 10
"""How often a client may ask whether a quiet connection stands. gRPC's own 300 s would cut off watchers that do."""


class GrpcServer:
    """The grpcio front end. Belongs to the event loop that it was made on.

    Args:
        registry: Where to register the ``grpc_server_*`` metrics.
        readiness: What health tells.
        max_message_bytes: The largest message to take or send.
    """

    def __init__(self, *, registry: CollectorRegistry, readiness: Readiness, max_message_bytes: int) -> None:
        self._readiness = readiness
        self._metrics = RpcMetrics(registry, methods_of(*OBSERVED_SERVICES))
        self._server = grpc.aio.server(
            interceptors=(
                MetricsInterceptor(self._metrics),
                RequestIdInterceptor(),
                AccessLogInterceptor(),
                ErrorInterceptor(),
                DecodingInterceptor(),
            ),
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", 0),  # else a second server on the same port would be let in silently
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_SECONDS * 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ),
        )

    def bind(self, host: str, port: int) -> int:
        """Take a port, any free one for 0, and return it.

        Raises:
            PortInUseError: It cannot be had.
        """
        try:
            return self._server.add_insecure_port(f"{_bracketed(host)}:{port}")
        except RuntimeError as error:
            raise PortInUseError(
                f"cannot listen for gRPC on {host}:{port}: the port is taken or the address is not this machine's; "
                "choose another with --grpc-port or --host, or let --grpc-port 0 take a free one"
            ) from error

    async def start(self, plane: DataPlane) -> None:
        """Begin to answer."""
        from understudy.service.grpcio import tfserving  # imports TensorFlow: a port in use is told before

        self._metrics.add(methods_of(*tfserving.SERVICES))
        prediction_pb2_grpc.add_PredictionServiceServicer_to_server(PredictionServicer(plane.prediction), self._server)
        evaluation_pb2_grpc.add_EvaluationServiceServicer_to_server(EvaluationServicer(plane.evaluation), self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(plane.model), self._server)
        metrics_pb2_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(plane.metrics), self._server)
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(plane.inference), self._server)
        tfserving.add_to_server(plane.tf_serving, self._server)
        names = [service.full_name for service in (*OWN_SERVICES, _INFERENCE, *tfserving.SERVICES)]
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(self._readiness, names), self._server)
        reflection.enable_server_reflection([*names, _HEALTH.full_name, reflection.SERVICE_NAME], self._server)
        await self._server.start()

    async def drain(self, seconds: float) -> None:
        """Refuse new calls and let those under way finish; cut off what is left when the time is up.

        Streams without an end of their own end when the service's readiness says that it drains.
        """
        await self._server.stop(seconds)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
