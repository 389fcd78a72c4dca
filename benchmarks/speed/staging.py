"""Checkpoints prepared beside a run folder, so that a commit is one rename."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.speed.models import model_file
from benchmarks.speed.processes import BenchmarkError, Launch, free_port
from benchmarks.speed.running import Bodies, RunningServer, running_one
from benchmarks.speed.servers import Site, serve_command
from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.atomic import sync
from understudy.checkpoints.layout import MODEL_FILE
from understudy.clients import Client

SERVE_SECONDS = 90.0
"""How long a checkpoint may take to be served."""

NEW_SLOTS = 2
"""The first checkpoints after the serving version each load into a new slot: the model is built and traced."""

_POLL_SECONDS = 0.005


@contextmanager
def serving_staged(
    work: Path, topic: str, bodies: Bodies, count: int, server: str = "understudy grpcio", *options: str
) -> Iterator[tuple[StagedCheckpoints, RunningServer, Client]]:
    """Serve the first of this many staged checkpoints, which alternate between the weights of the seeds 0 and 1."""
    folder = work / f"{topic}_{bodies.model.name}_{server}".replace(" ", "_")
    staged = StagedCheckpoints(folder, [model_file(work, bodies.model.name, seed) for seed in (0, 1)], count=count)
    staged.commit()
    site = Site(model=bodies.model, model_file=bodies.file, port=free_port(), folder=folder)
    launch = Launch(command=serve_command(site, "--run-dir", str(staged.run.root), *options))
    with (
        running_one(launch, name=server, port=site.port, log=folder / "log", bodies=bodies) as running,
        Client(running.target) as client,
    ):
        yield staged, running, client


class StagedCheckpoints:
    """Checkpoints of one model, which alternate between the contents of a few ``.keras`` files.

    They are published into a separate folder, and moved one by one into the run folder, which a service follows.
    """

    def __init__(self, folder: Path, files: Sequence[Path], *, count: int) -> None:
        self.run = RunDir(folder / "run")
        self._staged = RunDir(folder / "staged")
        self._next = 1
        self.run.checkpoints.mkdir(parents=True)
        publisher = CheckpointPublisher(self._staged, keep=count)
        for step in range(1, count + 1):
            source = files[step % len(files)]

            def link(into: Path, source: Path = source) -> None:
                os.link(source, into / MODEL_FILE)

            publisher.publish(step, link, epoch=None, final=False, metrics={}, signature=None)

    def commit(self) -> tuple[int, float]:
        """Commit the next one; return its step and the time of the commit, in seconds since the epoch."""
        step = self._next
        self._next += 1
        self._staged.checkpoint(step).rename(self.run.checkpoint(step))
        committed = time.time()
        sync(self.run.checkpoints)
        return step, committed

    def commit_and_wait(self, client: Client) -> float:
        """Commit the next one; return the seconds until it was serving."""
        step, committed = self.commit()
        wait_for(client, step)
        return time.time() - committed

    def settle(self, client: Client) -> None:
        """Wait until the last committed one is serving."""
        wait_for(client, self._next - 1)


def wait_for(client: Client, step: int) -> None:
    """Wait until a step is serving; raise BenchmarkError after `SERVE_SECONDS`."""
    ends = time.monotonic() + SERVE_SECONDS
    while client.status().serving_step != step:
        if time.monotonic() > ends:
            raise BenchmarkError(f"step {step} was not served within {SERVE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
