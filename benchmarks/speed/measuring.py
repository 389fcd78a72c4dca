"""The parameters of every topic: durations, rounds, the work folder, and progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.servers import LONG_QUEUE_ROWS, Server, floor, own, peers


class Progress:
    """Prints progress, a line at a time."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._steps = self._done = 0

    def expect(self, steps: int) -> None:
        """Set how many steps follow."""
        self._began = time.monotonic()
        self._steps, self._done = steps, 0

    def step(self, text: str) -> None:
        """Report that one step is done."""
        self._done += 1
        left = (time.monotonic() - self._began) / self._done * (self._steps - self._done)
        print(f"[{self._done}/{self._steps}, {left:.0f} s left] {text}", flush=True)

    def say(self, text: str) -> None:
        """Print another message."""
        print(text, flush=True)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How to measure: cells by rounds, each for some seconds after its warm-up; files go to the empty folder ``work``.

    Names of entrants must contain one of the words ``only``, if there are any. With peers, other projects' servers take
    part instead of the floor.
    """

    rounds: int
    seconds: float
    only: Sequence[str]
    with_peers: bool
    work: Path
    progress: Progress = field(default_factory=Progress)

    def wants(self, name: str) -> bool:
        """Return whether an entrant of that name takes part."""
        return not self.only or any(word in name for word in self.only)

    def servers(self) -> list[Server]:
        """Return the servers that take part; this project's with a queue that holds all connections' requests."""
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
        """Return this project's participating front ends, with their default settings."""
        return [server for server in own() if self.wants(server.name)]
