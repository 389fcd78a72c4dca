"""The descriptions of other projects' services come from their packages, and gain methods in later versions."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, MethodDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testkit.server_harness import FRONT_ENDS, PREDICTION_SERVICE, running_harness
from understudy.service import services
from understudy.service import services as reflection
from understudy.service.calls.caller import ANY_GROUP, OPEN_TO_ALL
from understudy.service.calls.methods import Handler, Service, foreign_service, service
from understudy.service.readiness import Readiness

NEW_METHODS = ("NewUnary", "NewClientStream", "NewServerStream", "NewBidiStream")


def grown(descriptor: ServiceDescriptor) -> ServiceDescriptor:
    """Return a service as a later version of its package may describe it: with a method more of each kind."""
    pool = DescriptorPool()
    _add_dependencies(pool, descriptor.file)
    file = _proto_of(descriptor.file)
    (described,) = [each for each in file.service if each.name == descriptor.name]
    known = descriptor.methods[0]
    for number, name in enumerate(NEW_METHODS):
        described.method.append(
            MethodDescriptorProto(
                name=name,
                input_type=f".{known.input_type.full_name}",
                output_type=f".{known.output_type.full_name}",
                client_streaming=bool(number & 1),
                server_streaming=bool(number & 2),
            )
        )
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindServiceByName(descriptor.full_name)
    assert isinstance(found, ServiceDescriptor)
    return found


def shrunk(descriptor: ServiceDescriptor, method: str) -> ServiceDescriptor:
    """Return a service as an earlier version of its package may describe it: without one of its methods."""
    pool = DescriptorPool()
    file = _proto_of(descriptor.file)
    (described,) = [each for each in file.service if each.name == descriptor.name]
    described.method.remove(next(each for each in described.method if each.name == method))
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindServiceByName(descriptor.full_name)
    assert isinstance(found, ServiceDescriptor)
    return found


def _proto_of(file: Any) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def _add_dependencies(pool: DescriptorPool, file: Any) -> None:
    for dependency in file.dependencies:
        _add_dependencies(pool, dependency)
        pool.AddSerializedFile(_proto_of(dependency).SerializeToString())


async def _check(_request: Any, _call: object) -> Any:
    return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def names_of(described: Service) -> set[str]:
    return {method.rpc.name for method in described.methods}


@pytest.fixture
def grown_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    tf_serving = tuple(grown(descriptor) for descriptor in services.tf_serving_services())
    monkeypatch.setattr(services, "HEALTH", grown(services.HEALTH))
    monkeypatch.setattr(reflection, "ALPHA", grown(reflection.ALPHA))
    monkeypatch.setattr(services, "tf_serving_services", lambda: tf_serving)


@pytest.mark.usefixtures("grown_everywhere")
async def test_every_service_is_there_when_the_descriptors_of_others_have_grown() -> None:
    there = services.all_services(MagicMock(), Readiness(), services.plain_codecs())
    assert {each.name for each in there} >= {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "tensorflow.serving.ModelService",
        "tensorflow.serving.PredictionService",
    }
    assert {name for each in there for name in names_of(each)}.isdisjoint(NEW_METHODS)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
async def test_a_new_method_is_unimplemented_and_the_known_ones_are_answered(front_end: str) -> None:
    health = foreign_service(grown(services.HEALTH), {"Check": Handler(OPEN_TO_ALL, _check)})
    async with running_harness(front_end, [health]) as harness:
        answer = await health_pb2_grpc.HealthStub(harness.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call: Any = harness.channel.unary_unary
        for name in NEW_METHODS:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(f"/grpc.health.v1.Health/{name}")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_answer_to_a_method_that_an_earlier_version_lacks_is_left_out() -> None:
    health = foreign_service(
        shrunk(services.HEALTH, "Watch"), dict.fromkeys(("Check", "Watch"), Handler(OPEN_TO_ALL, _check))
    )
    assert names_of(health) == {"Check"}


@pytest.mark.parametrize(
    "answers", [{}, {"Predict": _check}, {"Predict": _check, "PredictStream": _check, "X": _check}]
)
def test_every_method_of_a_service_of_our_own_has_an_answer_and_no_other_has(answers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{PREDICTION_SERVICE} has the methods \['Predict', 'PredictStream'\]"):
        service(services.PREDICTION, {name: Handler(ANY_GROUP, answer) for name, answer in answers.items()})


@pytest.mark.skipif(
    not hasattr(health_pb2, "HealthListResponse"), reason="this version of grpcio-health-checking has no List"
)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
async def test_health_lists_the_status_of_the_server_and_of_every_service(front_end: str) -> None:
    async with running_harness(front_end) as harness:
        stub: Any = health_pb2_grpc.HealthStub(harness.channel)
        request = health_pb2.HealthListRequest()
        statuses = health_pb2.HealthCheckResponse
        for state in (statuses.NOT_SERVING, statuses.SERVING):
            listed = (await stub.List(request)).statuses
            assert {name: answer.status for name, answer in listed.items()} == {"": state, PREDICTION_SERVICE: state}
            harness.readiness.become_ready()
