"""Bounding what it costs to parse a message."""

from __future__ import annotations

import time
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from testkit.costly_messages import MEBIBYTE, costly_messages, varint
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.oip import inference_pb2
from understudy.service.calls import parsing
from understudy.service.calls.parsing import parse
from understudy.v1 import prediction_pb2, tensor_pb2

LONGEST_SECONDS = 0.2
"""Of processor time, on slow machines; without the check the messages take up to several seconds."""


@pytest.mark.parametrize(("message_type", "data"), [pytest.param(*rest, id=name) for name, *rest in costly_messages()])
def test_a_message_of_too_many_parts_is_refused_before_it_is_parsed(message_type: Any, data: bytes) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidInputError, match="too many fields, nested messages or packed numbers, or too much text"):
        parse(message_type, data)
    assert time.thread_time() - began < LONGEST_SECONDS


@pytest.mark.parametrize(
    "message",
    [
        tensor_pb2.Tensor(content=bytes(4 * MEBIBYTE)),
        tensor_pb2.Tensor(strings=[b""] * 65_000),
        tensor_pb2.Tensor(strings=[b"x" * 300] * 50_000),
        inference_pb2.InferTensorContents(fp32_contents=[0.5] * MEBIBYTE),
        inference_pb2.InferTensorContents(int_contents=[1000] * (MEBIBYTE // 3)),
        prediction_pb2.PredictRequest(inputs={f"{name}": tensor_pb2.Tensor(content=bytes(20)) for name in range(900)}),
        prediction_pb2.PredictRequest(model_name="ü" * (MEBIBYTE // 3)),
    ],
)
def test_large_messages_of_few_parts_are_parsed(message: Any) -> None:
    data = message.SerializeToString()
    assert len(data) > parsing.UNCHECKED_BYTES
    assert parse(type(message), b"head" + data, 4) == message


FIELD = st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 2, 5]), st.binary(max_size=20)).map(
    lambda field: varint(field[0] << 3 | field[1]) + (varint(len(field[2])) if field[1] == 2 else b"") + field[2]
)


@given(st.lists(FIELD | st.binary(max_size=4)).map(b"".join))
def test_what_protobuf_parses_is_not_refused_and_what_it_refuses_is_not_parsed(data: bytes) -> None:
    def outcome() -> str:
        try:
            return str(parse(prediction_pb2.PredictRequest, data))
        except DecodeError:
            return "malformed"

    expected = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "UNCHECKED_BYTES", -1)
        found = outcome()
    assert found == expected or has_group(data)


def has_group(data: bytes) -> bool:
    """Return whether the walk meets a group, which proto3 does not have: only the check refuses them."""
    with pytest.raises(parsing.MalformedError) as raised:
        parsing.check_parts(prediction_pb2.PredictRequest.DESCRIPTOR, data)
    return "wire type" in str(raised.value)
