"""What every topic is given: how long and how often to measure, where to work, and whom to tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.speed.benchmark_errors import BenchmarkError
from benchmarks.speed.servers import LONG_QUEUE_ROWS, Server, floor, own, peers


class Progress:
    """Tells people how far it is, a line at a time."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._steps = self._done = 0

    def expect(self, steps: int) -> None:
        """Say how many steps follow."""
        self._began = time.monotonic()
        self._steps, self._done = steps, 0

    def step(self, text: str) -> None:
        """Say that one step is done."""
        self._done += 1
        left = (time.monotonic() - self._began) / self._done * (self._steps - self._done)
        print(f"[{self._done}/{self._steps}, {left:.0f} s left] {text}", flush=True)

    def say(self, text: str) -> None:
        """Say something else."""
        print(text, flush=True)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How to measure.

    Attributes:
        rounds: How often each cell is measured, by turns with all others.
        seconds: How long one measurement lasts, without its warm-up.
        only: Words of which the name of an entrant must hold one; everybody if there are none.
        with_peers: Whether the servers of others take part, in place of the floor.
        work: An empty folder for whatever is needed on the way.
        progress: Told how far it is.
    """

    rounds: int
    seconds: float
    only: Sequence[str]
    with_peers: bool
    work: Path
    progress: Progress = field(default_factory=Progress)

    def wants(self, name: str) -> bool:
        """Return whether somebody of that name takes part."""
        return not self.only or any(word in name for word in self.only)

    def servers(self) -> list[Server]:
        """Return the servers that take part; this project's with a queue that is long enough for all connections.

        Raises:
            BenchmarkError: None does, or one that should is not installed.
        """
        chosen = [
            server
            for server in (
                *own("--max-queue-examples", str(LONG_QUEUE_ROWS)),
                *(peers() if self.with_peers else floor()),
            )
            if self.wants(server.name)
        ]
        if not chosen:
            raise BenchmarkError(f"no server's name holds any of {list(self.only)}; leave ONLY out to measure all")
        return chosen

    def own_servers(self) -> list[Server]:
        """Return this project's front ends, as far as they take part, with the settings they have by default."""
        return [server for server in own() if self.wants(server.name)]
