"""Open Inference Protocol messages: the one request of each batch size, and what came back for it."""

from __future__ import annotations

import struct

import grpc
import numpy as np

from benchmarks.speed.benchmark_errors import BenchmarkError
from benchmarks.speed.models import INPUT, BenchmarkModel, Floats
from understudy.oip import inference_pb2

METHOD = "/inference.GRPCInferenceService/ModelInfer"
FRAME_BYTES = 5
"""What gRPC puts before each message on the wire."""

MESSAGE_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

_RELATIVE, _ABSOLUTE = 1e-4, 1e-5
"""How far values may differ: sums are added up in another order for another batch."""


def request(model: BenchmarkModel, rows: int) -> bytes:
    """Return a serialised ModelInferRequest with so many rows."""
    values = model.rows(rows)
    message = inference_pb2.ModelInferRequest(model_name=model.name, raw_input_contents=[values.tobytes()])
    message.inputs.add(name=INPUT, datatype="FP32", shape=values.shape)
    return message.SerializeToString()


def framed(message: bytes) -> bytes:
    """Return a message as gRPC puts it on the wire."""
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
    """Return the version that answered; with this project's server, a step."""
    return inference_pb2.ModelInferResponse.FromString(reply).model_version


def call(target: str, message: bytes, *, timeout_seconds: float) -> bytes:
    """Return the answer to one serialised request, waiting for the server if need be; raise `grpc.RpcError`."""
    with grpc.insecure_channel(target, options=MESSAGE_OPTIONS) as channel:
        reply: bytes = channel.unary_unary(METHOD, None, None)(message, timeout=timeout_seconds, wait_for_ready=True)
    return reply


def is_close(answered: Floats, expected: Floats) -> bool:
    """Return whether values are those the process gives."""
    return answered.shape == expected.shape and np.allclose(answered, expected, _RELATIVE, _ABSOLUTE)


def checked_reply(target: str, model: BenchmarkModel, rows: int, expected: Floats) -> bytes:
    """Return a server's answer to one batch, once it is seen to be what the process gives.

    Raises:
        BenchmarkError: Another status than OK came, or other values.
    """
    try:
        reply = call(target, request(model, rows), timeout_seconds=30)
    except grpc.RpcError as error:
        raise BenchmarkError(f"{target} refused a batch of {rows}: {error}") from error
    if not is_close(values(reply), expected):
        raise BenchmarkError(f"{target} answered a batch of {rows} with other values than the process gives")
    return reply
