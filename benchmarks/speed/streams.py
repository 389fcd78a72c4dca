"""PredictStreams for h2load: each of its requests is a stream of several messages of one example."""

from __future__ import annotations

import grpc
import numpy as np

from benchmarks.speed.benchmark_errors import BenchmarkError
from benchmarks.speed.models import INPUT, OUTPUT, BenchmarkModel, Floats
from benchmarks.speed.wire import FRAME_BYTES, MESSAGE_OPTIONS, framed, is_close
from understudy.v1 import prediction_pb2
from understudy.wire import decode, encode

METHOD = "/understudy.v1.PredictionService/PredictStream"
MESSAGES = 100
"""Messages per stream: enough that its own beginning and end count for little."""

_ANSWER_SECONDS = 30.0


def request(model: BenchmarkModel) -> bytes:
    """Return the serialized message."""
    inputs = {INPUT: encode(model.rows(1))}
    message = prediction_pb2.PredictStreamRequest(request=prediction_pb2.PredictRequest(inputs=inputs))
    return message.SerializeToString()


def body(model: BenchmarkModel) -> bytes:
    """Return a whole stream in gRPC's framing."""
    return framed(request(model)) * MESSAGES


def checked_reply_bytes(target: str, model: BenchmarkModel, expected: Floats) -> int:
    """Return the size of the framed answers to a whole stream, after comparing each with the in-process answer.

    Raises:
        BenchmarkError: The stream failed, an answer is an error, or a value differs.
    """
    with grpc.insecure_channel(target, options=MESSAGE_OPTIONS) as channel:
        call = channel.stream_stream(METHOD, None, None)
        try:
            replies: list[bytes] = list(call(iter([request(model)] * MESSAGES), timeout=_ANSWER_SECONDS))
        except grpc.RpcError as error:
            raise BenchmarkError(f"{target} refused a stream: {error}") from error
    right = [is_close(_values(reply), expected) for reply in replies]
    if len(right) != MESSAGES or not all(right):
        raise BenchmarkError(f"{target} answered {sum(right)} of {MESSAGES} messages of a stream as the process does")
    return sum(FRAME_BYTES + len(reply) for reply in replies)


def _values(reply: bytes) -> Floats:
    outputs = prediction_pb2.PredictStreamResponse.FromString(reply).response.outputs
    return decode(outputs[OUTPUT]) if OUTPUT in outputs else np.empty(0, np.float32)
