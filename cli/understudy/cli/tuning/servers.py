"""Servers with the settings of a candidate, and the load on them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from understudy.cli.processes import ChildProcess
from understudy.cli.tuning.search import Options, Turn

if TYPE_CHECKING:
    from understudy.clients import AsyncClient

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_REQUEST_SECONDS = 30.0
_WARM_UP_SECONDS = 0.2
_FROZEN_SECONDS = 3.0
"""After this long a server has begun to make constants of the weights; the first turns wait for it."""


class TunedServer:
    """A running ``understudy serve`` with some settings. A context manager that ends it.

    Args:
        arguments: The arguments of ``understudy serve`` that all candidates share.
        options: The settings of this candidate.
        folder: A new folder for its state and its log.
    """

    def __init__(self, arguments: Sequence[str], options: Options, folder: Path) -> None:
        self._stack = ExitStack()
        folder.mkdir()
        flags = [f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()]
        ports = ("--grpc-port", "0", "--http-port", "0", "--state-dir", str(folder / "state"))
        self._process = ChildProcess(
            "the server",
            ["-m", "understudy.cli", "serve", *arguments, *flags, *ports, "--no-self-tuning"],
            log=folder / "server.log",
            ends_with_parent=True,
        )
        self._stack.callback(lambda: self._process.stop(timeout_seconds=_STOP_SECONDS))
        try:
            found = self._process.wait_for_line(
                r"^READY grpc=(\S+) http=\S+ step=(\d+)", timeout_seconds=_START_SECONDS
            )
        except BaseException:
            self._stack.close()
            raise
        self.target, self.step = found[1], int(found[2])
        self._ready_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Idempotent."""
        self._stack.close()

    def scores(self, datasets: Sequence[str]) -> dict[str, dict[str, float]]:
        """Score the version that is served on datasets of the server; return the metrics by dataset."""
        from understudy.clients import Client

        with Client(self.target) as client:
            return {name: dict(client.evaluate_dataset(name, version=self.step).metrics) for name in datasets}

    def turn(self, requests: Sequence[Mapping[str, Any]], *, connections: int, seconds: float) -> Turn:
        """Keep a request in flight on each connection for this long, and measure."""
        time.sleep(max(0.0, self._ready_at + _FROZEN_SECONDS - time.monotonic()))
        return asyncio.run(self._load(requests, connections, seconds))

    async def _load(self, requests: Sequence[Mapping[str, Any]], connections: int, seconds: float) -> Turn:
        from understudy.clients import AsyncClient

        clients = [
            AsyncClient(self.target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(connections)
        ]
        try:
            await asyncio.gather(*(_ask(client, requests, _WARM_UP_SECONDS) for client in clients))
            began = time.monotonic()
            taken = await asyncio.gather(*(_ask(client, requests, seconds) for client in clients))
            elapsed = time.monotonic() - began
        finally:
            for client in clients:
                await client.close()
        latencies = list(itertools.chain.from_iterable(taken))
        return Turn(requests_per_second=len(latencies) / elapsed, p99_ms=1000 * float(np.percentile(latencies, 99)))


async def _ask(client: AsyncClient, requests: Sequence[Mapping[str, Any]], seconds: float) -> list[float]:
    """Send one request after another; return the latencies in seconds, at least one."""
    taken: list[float] = []
    ends = time.monotonic() + seconds
    for request in itertools.cycle(requests):
        began = time.monotonic()
        await client.predict(request, timeout_seconds=_REQUEST_SECONDS)
        taken.append(time.monotonic() - began)
        if time.monotonic() >= ends:
            break
    return taken
