"""Server reflection in its two versions, whose messages differ in their package only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any

from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

from understudy.service.calls.call import CallContext
from understudy.service.calls.methods import Requests, Service, foreign_service

ALPHA: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
"""The service of version 1alpha."""

_ALPHA_VERSION = "v1alpha"
_VERSION = "v1"


def reflection_services(names: Iterable[str]) -> tuple[Service, ...]:
    """Return both versions of the service that describes services.

    Args:
        names: Full names of the services to describe, without those of reflection itself.
    """
    servicer = reflection.aio.ReflectionServicer([*names, ALPHA.full_name, _declared_version_1()])  # type: ignore[attr-defined]

    def info(requests: Requests, call: CallContext) -> AsyncGenerator[Any, None]:
        del call
        answers: AsyncGenerator[Any, None] = servicer.ServerReflectionInfo(requests, None)
        return answers

    alpha = foreign_service(ALPHA, {"ServerReflectionInfo": info})
    return alpha, _as_version_1(alpha)


def _declared_version_1() -> str:
    """Register the descriptor of version 1, which grpcio-reflection lacks; return its full name."""
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace(_ALPHA_VERSION, _VERSION)
    declared = text_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(declared.SerializeToString())
    return ALPHA.full_name.replace(_ALPHA_VERSION, _VERSION)


def _as_version_1(alpha: Service) -> Service:
    """Return the service under its version 1 name, with the messages of version 1alpha, which encode the same."""
    name = alpha.name.replace(_ALPHA_VERSION, _VERSION)
    methods = [replace(method, rpc=replace(method.rpc, service=name)) for method in alpha.methods]
    return Service(name=name, methods=tuple(methods))
