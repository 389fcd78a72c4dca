from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testkit.server_harness import PREDICTION_SERVICE, ServerHarness

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def asking(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.fixture
def stub(harness: ServerHarness) -> Any:
    return health_pb2_grpc.HealthStub(harness.channel)


@pytest.mark.parametrize("service", ["", PREDICTION_SERVICE])
async def test_the_server_and_each_service_serve_from_the_first_checkpoint_until_draining(
    harness: ServerHarness, stub: Any, service: str
) -> None:
    assert (await stub.Check(asking(service))).status == NOT_SERVING
    harness.readiness.become_ready()
    assert (await stub.Check(asking(service))).status == SERVING
    harness.readiness.start_draining()
    assert (await stub.Check(asking(service))).status == NOT_SERVING


async def test_a_draining_server_does_not_become_ready(harness: ServerHarness, stub: Any) -> None:
    harness.readiness.start_draining()
    harness.readiness.become_ready()
    assert (await stub.Check(asking(""))).status == NOT_SERVING


async def test_checking_an_unknown_service_is_not_found_and_names_those_there_are(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=PREDICTION_SERVICE) as caught:
        await stub.Check(asking("no.such.Service"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watching_an_unknown_service_says_so(stub: Any) -> None:
    watch = stub.Watch(asking("no.such.Service"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    watch.cancel()


async def test_every_watcher_sees_every_change_even_after_another_left(harness: ServerHarness, stub: Any) -> None:
    leaving = stub.Watch(asking(""))
    staying = aiter(stub.Watch(asking("")))
    assert [(await anext(watch)).status for watch in (aiter(leaving), staying)] == [NOT_SERVING, NOT_SERVING]
    leaving.cancel()
    await harness.ended.get()
    harness.readiness.become_ready()
    assert (await anext(staying)).status == SERVING
    harness.readiness.start_draining()
    assert (await anext(staying)).status == NOT_SERVING


async def test_watches_end_when_the_server_drains(harness: ServerHarness, stub: Any) -> None:
    harness.readiness.become_ready()
    watch = aiter(stub.Watch(asking("")))
    assert (await anext(watch)).status == SERVING
    harness.readiness.start_draining()
    assert [response.status async for response in watch] == [NOT_SERVING]
