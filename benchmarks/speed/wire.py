"""Open Inference Protocol messages: the request of each batch size, and the check of its answer."""

from __future__ import annotations

import struct
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks.speed.benchmark_errors import BenchmarkError
from benchmarks.speed.models import INPUT, BenchmarkModel, Floats
from understudy.oip import inference_pb2

METHOD = "/inference.GRPCInferenceService/ModelInfer"
FRAME_BYTES = 5
"""gRPC's prefix of each message: a flag and a length."""

MESSAGE_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

_RELATIVE, _ABSOLUTE = 1e-4, 1e-5
"""The tolerance for values: the order of sums depends on the batch size."""


def request(model: BenchmarkModel, rows: int) -> bytes:
    """Return a serialized ModelInferRequest with this many examples."""
    values = model.rows(rows)
    message = inference_pb2.ModelInferRequest(model_name=model.name, raw_input_contents=[_raw(values)])
    message.inputs.add(name=INPUT, datatype=model.datatype, shape=values.shape)
    return message.SerializeToString()


def _raw(values: npt.NDArray[Any]) -> bytes:
    """Return the elements in the protocol's raw form: each string after its length."""
    if values.dtype != object:
        return values.tobytes()
    return b"".join(struct.pack("<I", len(text)) + text for text in values.flat)


def framed(message: bytes) -> bytes:
    """Return a message in gRPC's framing."""
    return struct.pack("!?I", False, len(message)) + message


def values(reply: bytes) -> Floats:
    """Return the first output of a serialised ModelInferResponse."""
    message = inference_pb2.ModelInferResponse.FromString(reply)
    output = message.outputs[0]
    if message.raw_output_contents:
        flat = np.frombuffer(message.raw_output_contents[0], np.float32)
    else:
        flat = np.asarray(output.contents.fp32_contents, np.float32)
    return flat.reshape(tuple(output.shape))


def version(reply: bytes) -> str:
    """Return the version that answered; for this project's server, a step."""
    return inference_pb2.ModelInferResponse.FromString(reply).model_version


def call(target: str, message: bytes, *, timeout_seconds: float) -> bytes:
    """Return the answer to one serialized request, waiting for the server if necessary; raise `grpc.RpcError`."""
    with grpc.insecure_channel(target, options=MESSAGE_OPTIONS) as channel:
        reply: bytes = channel.unary_unary(METHOD, None, None)(message, timeout=timeout_seconds, wait_for_ready=True)
    return reply


def is_close(answered: Floats, expected: Floats) -> bool:
    """Return whether values equal the in-process ones."""
    return answered.shape == expected.shape and np.allclose(answered, expected, _RELATIVE, _ABSOLUTE)


def checked_reply(target: str, model: BenchmarkModel, rows: int, expected: Floats) -> bytes:
    """Return a server's answer to one batch, after comparing it with the in-process answer.

    Raises:
        BenchmarkError: The status is not OK, or values differ.
    """
    try:
        reply = call(target, request(model, rows), timeout_seconds=30)
    except grpc.RpcError as error:
        raise BenchmarkError(f"{target} refused a batch of {rows}: {error}") from error
    if not is_close(values(reply), expected):
        raise BenchmarkError(f"{target} answered a batch of {rows} with other values than the process gives")
    return reply
