"""Messages and bodies that cost a server much for their size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorflow_serving.apis import predict_pb2

from understudy.oip import inference_pb2
from understudy.v1 import evaluation_pb2, prediction_pb2, tensor_pb2

MEBIBYTE = 1 << 20


def nested(number: int, content: bytes) -> bytes:
    """Return a field of bytes or of a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    encoded = b""
    while value >= 0x80:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def keyed(number: int) -> bytes:
    """Return 4 MiB of a field's messages, each with a key of its own."""
    key = b"00000"
    head = nested(number, nested(1, key)).removesuffix(key)
    return b"".join(head + b"%05x" % each for each in range(4 * MEBIBYTE // len(head + key)))


def costly_messages() -> Iterator[tuple[str, Any, bytes]]:
    """Yield names, types and contents of messages of 4 MiB that take long to parse or to handle."""
    metrics, inputs = (
        evaluation_pb2.EvaluateRequest.OPTIONS_FIELD_NUMBER,
        prediction_pb2.PredictRequest.INPUTS_FIELD_NUMBER,
    )
    infer, own, serving = inference_pb2.ModelInferRequest, prediction_pb2.PredictRequest, predict_pb2.PredictRequest
    many = 2 * MEBIBYTE
    yield "empty BYTES elements", infer, nested(5, nested(5, b"\x42\0" * many))
    yield "empty inputs", infer, b"\x2a\0" * many
    yield "raw contents", infer, b"\x3a\0" * many
    yield "parameters", infer, keyed(4)
    yield "packed numbers", infer, nested(5, nested(5, nested(3, b"\1" * 2 * many)))
    yield "separate numbers", infer, nested(5, nested(5, b"\x18\1" * many))
    yield "a shape", own, nested(inputs, nested(1, b"x") + nested(2, nested(2, b"\1" * 2 * many)))
    yield "strings", own, nested(inputs, nested(1, b"x") + nested(2, b"\x22\0" * many))
    yield "inputs of one element", own, keyed(inputs)
    yield "axes", serving, nested(2, nested(1, b"x") + nested(2, nested(2, b"\x12\0" * many)))
    yield "filters", serving, b"\x1a\0" * many
    yield "metrics", evaluation_pb2.EvaluateRequest, nested(metrics, b"\x1a\0" * many)
    yield "unknown fields", infer, b"\xf8\x07\1" * many
    yield "a name", own, nested(1, "\U0010ffff".encode() * MEBIBYTE)
    yield "a key", infer, nested(5, nested(4, nested(1, b"a" * 2 * many)))
    yield "texts", evaluation_pb2.EvaluateRequest, nested(metrics, nested(4, b"a" * 4096) * 1024)
    yield "fields in turn", tensor_pb2.Tensor, b"\x22\0\x1a\0" * (many // 2)


def costly_bodies() -> Iterator[bytes]:
    """Yield bodies of about 1 MiB of REST requests to infer."""
    for datatype, element, count in (
        ("FP32", "0,", MEBIBYTE // 2),
        ("FP32", "0.123456789012345678,", MEBIBYTE // 21),
        ("BYTES", '"",', MEBIBYTE // 3),
        ("FP32", "[],", 60_000),
        ("FP32", "[],", MEBIBYTE // 3),
        ("INT64", "9" * 4000 + ",", MEBIBYTE // 4000),
        ("FP32", "[" * 50_000, 1),
        ("FP32", '{"a": 0},', 15_000),
    ):
        tensor = f'{{"name": "x", "datatype": "{datatype}", "shape": [{count + 1}], "data": [{element * count}0]}}'
        yield f'{{"inputs": [{tensor}]}}'.encode()
    members = ",".join(f'"{number}": 0' for number in range(MEBIBYTE // 12))
    yield f'{{"inputs": [], "parameters": {{{members}}}}}'.encode()
