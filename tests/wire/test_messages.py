"""What holds for every message of `understudy.v1`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from understudy.v1 import evaluation_pb2, metrics_pb2, model_pb2, prediction_pb2

FILES = (evaluation_pb2, metrics_pb2, model_pb2, prediction_pb2)
OF_THE_SERVER = {"GetMetricsRequest"}
"""Requests that no model is the subject of."""


def requests() -> Iterator[Descriptor]:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (method.input_type for method in service.methods)


def message_that_opens(request: Descriptor) -> Descriptor:
    """Return the message that says what a call is about: the request, or a part of the first of its stream."""
    for part in ("options", "request"):
        if part in request.fields_by_name and (message := request.fields_by_name[part].message_type) is not None:
            return message
    return request


@pytest.mark.parametrize("request_name", sorted({request.name for request in requests()} - OF_THE_SERVER))
def test_every_request_can_name_the_model(request_name: str) -> None:
    (request,) = (request for request in requests() if request.name == request_name)
    field = message_that_opens(request).fields_by_name["model_name"]
    assert (field.number, field.type) == (1, FieldDescriptor.TYPE_STRING)


def test_no_method_shares_a_request_or_a_response_with_another_or_keeps_it_in_a_message() -> None:
    methods = [
        method for file in FILES for service in file.DESCRIPTOR.services_by_name.values() for method in service.methods
    ]
    ends = [end.name for method in methods for end in (method.input_type, method.output_type)]
    assert sorted(ends) == sorted(set(ends))
    held = {
        field.message_type.name
        for file in FILES
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.message_type is not None
    }
    carried_by_streams = {"PredictRequest", "PredictResponse"}
    assert held & set(ends) == carried_by_streams
