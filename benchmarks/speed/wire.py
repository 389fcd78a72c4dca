"""Requests in the Open Inference Protocol and of a PredictStream, and the checks of their answers."""

from __future__ import annotations

import struct
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks.speed.models import INPUT, OUTPUT, BenchmarkModel, Floats
from benchmarks.speed.processes import BenchmarkError
from understudy.oip import inference_pb2
from understudy.v1 import prediction_pb2
from understudy.wire import decode, encode

METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/understudy.v1.PredictionService/PredictStream"
MESSAGES = 100
"""Messages per stream: enough that its own beginning and end count for little."""
FRAME_BYTES = 5
"""gRPC's prefix of each message: a flag and a length."""

MESSAGE_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

_ANSWER_SECONDS = 30.0
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
    """Return a server's answer to one batch; raise BenchmarkError unless it is the in-process answer."""
    try:
        reply = call(target, request(model, rows), timeout_seconds=_ANSWER_SECONDS)
    except grpc.RpcError as error:
        raise BenchmarkError(f"{target} refused a batch of {rows}: {error}") from error
    if not is_close(values(reply), expected):
        raise BenchmarkError(f"{target} answered a batch of {rows} with other values than the process gives")
    return reply


def stream_request(model: BenchmarkModel) -> bytes:
    """Return a serialized PredictStreamRequest with one example."""
    inputs = {INPUT: encode(model.rows(1))}
    message = prediction_pb2.PredictStreamRequest(request=prediction_pb2.PredictRequest(inputs=inputs))
    return message.SerializeToString()


def stream_body(model: BenchmarkModel) -> bytes:
    """Return a whole stream in gRPC's framing."""
    return framed(stream_request(model)) * MESSAGES


def checked_stream_bytes(target: str, model: BenchmarkModel, expected: Floats) -> int:
    """Return the size of the framed answers to a stream; raise BenchmarkError unless each is the in-process one."""
    with grpc.insecure_channel(target, options=MESSAGE_OPTIONS) as channel:
        call = channel.stream_stream(STREAM_METHOD, None, None)
        try:
            replies: list[bytes] = list(call(iter([stream_request(model)] * MESSAGES), timeout=_ANSWER_SECONDS))
        except grpc.RpcError as error:
            raise BenchmarkError(f"{target} refused a stream: {error}") from error
    right = [is_close(_streamed_values(reply), expected) for reply in replies]
    if len(right) != MESSAGES or not all(right):
        raise BenchmarkError(f"{target} answered {sum(right)} of {MESSAGES} messages of a stream as the process does")
    return sum(FRAME_BYTES + len(reply) for reply in replies)


def _streamed_values(reply: bytes) -> Floats:
    outputs = prediction_pb2.PredictStreamResponse.FromString(reply).response.outputs
    return decode(outputs[OUTPUT]) if OUTPUT in outputs else np.empty(0, np.float32)
