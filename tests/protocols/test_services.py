"""The services of other servers' protocols stand beside our own on the one port."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testkit.served import Pair
from understudy.clients import Client

FOREIGN = (
    "inference.GRPCInferenceService",
    "tensorflow.serving.PredictionService",
    "tensorflow.serving.ModelService",
)


@pytest.fixture
def channel(served: Pair) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.plain.grpc) as channel:
        yield channel


@pytest.mark.parametrize("service", FOREIGN)
def test_their_health_is_told(channel: grpc.Channel, service: str) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("service", "method"),
    [(FOREIGN[0], "CudaSharedMemoryStatus"), (FOREIGN[1], "MultiInference"), (FOREIGN[2], "GetModelStatus")],
)
def test_their_calls_have_series_from_the_start(native_plain: Client, service: str, method: str) -> None:
    labels = f'grpc_type="unary",grpc_service="{service}",grpc_method="{method}"'.split(",")
    lines = [line for line in native_plain.metrics().splitlines() if line.startswith("grpc_server_started_total{")]
    assert [line for line in lines if all(label in line for label in labels)]
