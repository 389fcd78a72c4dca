"""Bounding what it costs to parse a message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_serving.apis import predict_pb2

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.oip import inference_pb2
from understudy.service.calls import parsing
from understudy.service.calls.parsing import parse
from understudy.v1 import evaluation_pb2, prediction_pb2, tensor_pb2

MEBIBYTE = 1 << 20
LONGEST_SECONDS = 0.2
"""Of processor time, on slow machines; without the check the messages take up to several seconds."""


def nested(number: int, content: bytes) -> bytes:
    """Return a field of bytes or of a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    encoded = b""
    while value >= 0x80:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def costly() -> Iterator[Any]:
    """Yield types and messages of 4 MiB that take long to parse or to handle."""
    metrics, inputs = (
        evaluation_pb2.EvaluateRequest.OPTIONS_FIELD_NUMBER,
        prediction_pb2.PredictRequest.INPUTS_FIELD_NUMBER,
    )
    infer, own, serving = inference_pb2.ModelInferRequest, prediction_pb2.PredictRequest, predict_pb2.PredictRequest
    many = 2 * MEBIBYTE
    yield "empty BYTES elements", infer, nested(5, nested(5, b"\x42\0" * many))
    yield "empty inputs", infer, b"\x2a\0" * many
    yield "raw contents", infer, b"\x3a\0" * many
    yield "parameters", infer, b"".join(nested(4, nested(1, b"%x" % key)) for key in range(many // 5))
    yield "packed numbers", infer, nested(5, nested(5, nested(3, b"\1" * 2 * many)))
    yield "separate numbers", infer, nested(5, nested(5, b"\x18\1" * many))
    yield "a shape", own, nested(inputs, nested(1, b"x") + nested(2, nested(2, b"\1" * 2 * many)))
    yield "strings", own, nested(inputs, nested(1, b"x") + nested(2, b"\x22\0" * many))
    yield "inputs of one element", own, b"".join(nested(inputs, nested(1, b"%x" % key)) for key in range(many // 5))
    yield "axes", serving, nested(2, nested(1, b"x") + nested(2, nested(2, b"\x12\0" * many)))
    yield "filters", serving, b"\x1a\0" * many
    yield "metrics", evaluation_pb2.EvaluateRequest, nested(metrics, b"\x1a\0" * many)
    yield "unknown fields", infer, b"\xf8\x07\1" * many
    yield "fields in turn", tensor_pb2.Tensor, b"\x22\0\x1a\0" * (many // 2)


@pytest.mark.parametrize(("message_type", "data"), [pytest.param(*rest, id=name) for name, *rest in costly()])
def test_a_message_of_too_many_parts_is_refused_before_it_is_parsed(message_type: Any, data: bytes) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidInputError, match="too many fields, nested messages or packed numbers"):
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
        prediction_pb2.PredictRequest(model_name="ü" * MEBIBYTE),
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
