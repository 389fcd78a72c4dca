"""Committed to served: from the rename that commits a checkpoint to the first answer by it, polling included."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.speed import wire
from benchmarks.speed.errors import BenchmarkError
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import dense_of, model_file
from benchmarks.speed.processes import Launch, free_port
from benchmarks.speed.running import Bodies, prepare, running_one
from benchmarks.speed.servers import Site, serve_command
from benchmarks.speed.staging import StagedCheckpoints
from understudy.clients import Client

COMMITS = {10: 6, 200: 5, 1024: 2}
"""How many checkpoints of so many MiB of weights are committed."""

SERVE_SECONDS = 60.0
"""How long a checkpoint may take until it is served."""

_LOOK_SECONDS = 0.002
_PHASE_SECONDS = 0.13
"""Commits come at moments that do not keep step with the polling."""


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure every size; return the seconds of each commit."""
    rows: list[dict[str, Any]] = []
    measuring.progress.expect(len(COMMITS))
    for mebibytes, commits in COMMITS.items():
        bodies = prepare(measuring.work, dense_of(mebibytes), seeds=(0, 1))
        seconds = _measure(measuring, bodies, commits)
        for seed in (0, 1):
            model_file(measuring.work, bodies.model.name, seed).unlink()
        rows.append({"mebibytes": mebibytes, "seconds": seconds})
        measuring.progress.step(f"{bodies.model.text}: {', '.join(f'{value:.2f} s' for value in seconds)}")
    return {"rows": rows}


def _measure(measuring: Measuring, bodies: Bodies, commits: int) -> list[float]:
    folder = measuring.work / f"publishing_{bodies.model.name}"
    files = [model_file(measuring.work, bodies.model.name, seed) for seed in (0, 1)]
    staged = StagedCheckpoints(folder, files, count=commits + 2)
    staged.commit()
    site = Site(model=bodies.model, model_file=bodies.file, port=free_port(), folder=folder)
    launch = Launch(command=serve_command(site, "--run-dir", str(staged.run.root)))
    with (
        running_one(launch, name="understudy grpcio", port=site.port, log=folder / "log", bodies=bodies) as server,
        Client(server.target) as client,
    ):
        _commit_and_wait(staged, client)  # the second one makes the slot that the others are loaded into
        seconds = []
        for turn in range(commits):
            time.sleep(_PHASE_SECONDS * (turn + 1))
            seconds.append(round(_commit_and_wait(staged, client), 3))
        _check_step(server.target, bodies, commits + 2)
    return seconds


def _commit_and_wait(staged: StagedCheckpoints, client: Client) -> float:
    """Return the seconds from the commit until the step is on stage."""
    step, committed = staged.commit()
    ends = time.monotonic() + SERVE_SECONDS
    while client.status().serving_step != step:
        if time.monotonic() > ends:
            raise BenchmarkError(f"step {step} was not served within {SERVE_SECONDS:.0f} s")
        time.sleep(_LOOK_SECONDS)
    return time.time() - committed


def _check_step(target: str, bodies: Bodies, expected: int) -> None:
    reply = wire.call(target, wire.request(bodies.model, 1), timeout_seconds=30)
    if wire.version(reply) != str(expected):
        raise BenchmarkError(f"step {expected} is on stage, but step {wire.version(reply)} answered")
