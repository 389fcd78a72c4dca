"""Measures an evaluator that many servers follow: how long a decision takes to reach all, and what idle ones cost.

    python -m benchmarks.fleet RUN [--servers 1000] [--decisions 50]

RUN is a run folder with at least two checkpoints. The servers are streams of one process, which load nothing. Writes
``benchmarks/results/fleet.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from benchmarks.speed.processes import Launch, ProcessTree, free_port
from understudy.clients import AsyncClient
from understudy.v1 import fleet_pb2, fleet_pb2_grpc

RESULT = Path(__file__).parent / "results" / "fleet.json"
STREAMS_OF_A_CHANNEL = 50
IDLE_SECONDS = 10.0
POLL_SECONDS = 0.1


class _Server:
    """A stream that follows, and when it heard which decision."""

    def __init__(self, channel: grpc.aio.Channel, number: int) -> None:
        self._stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)  # its type asks for an iterator of requests
        self._name = f"server-{number}"
        self._heard = asyncio.Condition()
        self._decision = fleet_pb2.ServingDecision()
        self._at = 0.0

    async def follow(self) -> None:
        """Follow until cancelled, and report each decision as carried out."""
        call = self._stub.Follow()
        await call.write(fleet_pb2.FollowRequest(name=self._name))
        async for response in call:
            async with self._heard:
                self._decision, self._at = response.decision, time.monotonic()
                self._heard.notify_all()
            await call.write(
                fleet_pb2.FollowRequest(serving_step=response.decision.step, serving_digest=response.decision.digest)
            )

    async def heard(self, step: int) -> float:
        """Wait for a decision; return when it came."""
        async with self._heard:
            await self._heard.wait_for(lambda: self._decision.step == step)
            return self._at


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--decisions", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        port = free_port()
        options = ("--run-dir", str(arguments.run), "--state-dir", state, f"--grpc-port={port}", "--http-port=0")
        launch = Launch(command=(sys.executable, "-m", "understudy.cli", "serve", *options, "--log-level=error"))
        with ProcessTree("evaluator", launch, log=Path(state) / "log") as evaluator:
            target = f"127.0.0.1:{port}"
            figures = asyncio.run(measure(target, evaluator, arguments.servers, arguments.decisions))
    facts = {"python": platform.python_version(), "processors": len(os.sched_getaffinity(0))}
    RESULT.write_text(json.dumps({**figures, **facts}, indent=2) + "\n")
    print(json.dumps(figures))


async def measure(target: str, tree: ProcessTree, servers: int, decisions: int) -> dict[str, float]:
    """Return the figures of this many servers."""
    async with AsyncClient(target, timeout_seconds=120.0) as client:
        while (await client.status(wait_for_ready=True)).serving_step is None:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(POLL_SECONDS)
        (process,) = psutil.Process(tree.popen.pid).children()  # not its own children
        steps = [checkpoint.step for checkpoint in await client.checkpoints()][-2:]
        await client.promote(steps[0])
        idle_before = await _busy_share(process)
        memory_before = process.memory_info().rss / 2**20
        channels = [grpc.aio.insecure_channel(target) for _ in range(-(-servers // STREAMS_OF_A_CHANNEL))]
        each = [_Server(channels[number // STREAMS_OF_A_CHANNEL], number) for number in range(servers)]
        began = time.monotonic()
        tasks = [asyncio.create_task(server.follow()) for server in each]
        await asyncio.gather(*(server.heard(steps[0]) for server in each))
        connected = time.monotonic() - began
        idle_after, memory = await _busy_share(process), process.memory_info().rss / 2**20
        seconds = []
        for number in range(decisions):
            step = steps[(number + 1) % 2]
            began = time.monotonic()
            waiting = [asyncio.create_task(server.heard(step)) for server in each]
            await client.promote(step)
            seconds.append(max(await asyncio.gather(*waiting)) - began)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close(None)
    seconds.sort()
    return {
        "servers": servers,
        "decisions": decisions,
        "connecting_seconds": round(connected, 3),
        "median_seconds_until_all_heard": round(seconds[len(seconds) // 2], 4),
        "longest_seconds_until_all_heard": round(seconds[-1], 4),
        "evaluator_busy_share_alone": round(idle_before, 4),
        "evaluator_busy_share_followed": round(idle_after, 4),
        "evaluator_memory_mib_of_all": round(memory - memory_before, 1),
    }


async def _busy_share(process: psutil.Process) -> float:
    """Return the share of one processor that a process takes while nothing happens."""
    await asyncio.sleep(1.0)
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(IDLE_SECONDS)
    return (sum(process.cpu_times()[:2]) - before) / IDLE_SECONDS


if __name__ == "__main__":
    main()
