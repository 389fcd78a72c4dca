"""Predicts over several PredictStreams at once, from one Python process, on grpc.aio with raw bytes.

    python -m benchmarks.speed.programs.streams TARGET MODEL

A worker: given ``rows``, ``streams``, ``depth`` and ``seconds``, it keeps ``depth`` requests under way on each stream.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from typing import Any

import grpc

from benchmarks.speed.errors import BenchmarkError
from benchmarks.speed.h2load import WARM_UP_SECONDS
from benchmarks.speed.models import INPUT, model_named
from benchmarks.speed.wire import MESSAGE_OPTIONS
from benchmarks.speed.workers import answer_questions
from understudy.v1 import prediction_pb2
from understudy.wire import encode

METHOD = "/understudy.v1.PredictionService/PredictStream"


class Run:
    """One measurement over one channel.

    Args:
        message: The serialised PredictStreamRequest to send again and again.
        seconds: How long to measure after the warm-up.
    """

    def __init__(self, message: bytes, seconds: float) -> None:
        self._message = message
        self._counts_from = time.perf_counter() + WARM_UP_SECONDS
        self._ends = self._counts_from + seconds
        self.latencies: list[float] = []
        self.answered = 0
        self.reply = b""

    async def stream(self, call: Any, depth: int) -> None:
        """Keep ``depth`` requests under way on one stream; answers come in the order of the requests."""
        sent: deque[float] = deque()
        for _ in range(depth):
            sent.append(time.perf_counter())
            await call.write(self._message)
        while sent:
            self.reply = await call.read()
            now = time.perf_counter()
            self.answered += 1
            began = sent.popleft()
            if self._counts_from <= now < self._ends:
                self.latencies.append(round(1000 * (now - began), 4))
            if now < self._ends:
                sent.append(now)
                await call.write(self._message)
        await call.done_writing()


async def measure(target: str, message: bytes, *, streams: int, depth: int, seconds: float) -> dict[str, Any]:
    """Measure; raise BenchmarkError if the last answer is an error."""
    run = Run(message, seconds)
    async with grpc.aio.insecure_channel(target, options=MESSAGE_OPTIONS) as channel:
        method = channel.stream_stream(METHOD, None, None)
        await asyncio.gather(*(run.stream(method(None, timeout=seconds + 60), depth) for _ in range(streams)))
    if not prediction_pb2.PredictStreamResponse.FromString(run.reply).HasField("response"):
        raise BenchmarkError(f"an error came over the stream: {run.reply!r}")
    return {"latencies_ms": run.latencies, "seconds": seconds, "answered": run.answered}


def main(target: str, model_name: str) -> None:
    """Answer questions."""
    model = model_named(model_name)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        inputs = {INPUT: encode(model.rows(question["rows"]))}
        message = prediction_pb2.PredictStreamRequest(request=prediction_pb2.PredictRequest(inputs=inputs))
        options = {name: question[name] for name in ("streams", "depth", "seconds")}
        return asyncio.run(measure(target, message.SerializeToString(), **options))

    answer_questions(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
