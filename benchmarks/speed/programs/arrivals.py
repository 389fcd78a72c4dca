"""Open loop: requests that arrive as a Poisson process, whether or not earlier ones were answered.

    python -m benchmarks.speed.programs.arrivals MODEL

A worker on grpc.aio with raw bytes: given ``target``, ``rows``, ``rate``, ``seconds`` and ``seed``, it sends for that
long. Latency counts from the moment a request should have been sent, so a server, or this process, that falls behind
is not forgiven. Refusals count from the moment they were sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from typing import Any

import grpc
import numpy as np

from benchmarks.speed import wire
from benchmarks.speed.h2load import WARM_UP_SECONDS
from benchmarks.speed.models import model_named
from benchmarks.speed.workers import answer_questions

CHANNELS = 8
TIMEOUT_SECONDS = 20.0

_OPTIONS = (*wire.MESSAGE_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class Run:
    """One measurement: sends a message at each of these offsets, in ascending seconds from the beginning."""

    def __init__(self, message: bytes, offsets: list[float], seconds: float) -> None:
        self._message = message
        self._offsets = offsets
        self._seconds = seconds
        self.answers: list[tuple[float, float]] = []  # when it was due, and when the answer arrived
        self.refusals: list[float] = []
        self.late: list[float] = []
        self.codes: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()

    async def send_all(self, target: str) -> None:
        """Send, and wait for requests in flight."""
        channels = [grpc.aio.insecure_channel(target, options=_OPTIONS) for _ in range(CHANNELS)]
        calls = [channel.unary_unary(wire.METHOD, None, None) for channel in channels]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        self._began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, offset in enumerate(self._offsets):
                await asyncio.sleep(max(0.0, self._began + offset - time.perf_counter()))
                group.create_task(self._ask(calls[number % CHANNELS], offset))
        for channel in channels:
            await channel.close(None)

    async def _ask(self, call: Any, offset: float) -> None:
        sent = time.perf_counter() - self._began
        counts = offset >= WARM_UP_SECONDS
        try:
            reply = await call(self._message, timeout=TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            self.codes[error.code().name] += 1
            if counts:
                self.refusals.append(time.perf_counter() - self._began - sent)
            return
        came = time.perf_counter() - self._began
        self.codes["OK"] += 1
        self.versions[wire.version(reply)] += 1
        if counts:
            self.late.append(sent - offset)
        self.answers.append((offset, came))

    def result(self) -> dict[str, Any]:
        """Return the results: latencies in milliseconds, requests by status code and by version."""
        last = WARM_UP_SECONDS + self._seconds
        answered = sum(WARM_UP_SECONDS <= came < last for _, came in self.answers)
        latencies = [came - offset for offset, came in self.answers if offset >= WARM_UP_SECONDS]
        return {
            "latencies_ms": [round(1000 * value, 3) for value in latencies],
            "refusals_ms": [round(1000 * value, 3) for value in self.refusals],
            "late_p99_ms": round(1000 * float(np.percentile(self.late, 99)), 3) if self.late else None,
            "answered_per_second": answered / self._seconds,
            "codes": dict(self.codes),
            "versions": dict(self.versions),
        }


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of a Poisson process, in seconds from its beginning."""
    chance = np.random.default_rng(seed)
    count = int(rate * seconds * 1.5) + 50
    moments = np.cumsum(chance.exponential(1 / rate, count))
    return [float(moment) for moment in moments[moments < seconds]]


def main(model_name: str) -> None:
    """Answer questions."""
    model = model_named(model_name)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        offsets = arrivals(question["rate"], WARM_UP_SECONDS + question["seconds"], question["seed"])
        run = Run(wire.request(model, question["rows"]), offsets, question["seconds"])
        asyncio.run(run.send_all(question["target"]))
        return run.result()

    answer_questions(answer)


if __name__ == "__main__":
    main(sys.argv[1])
