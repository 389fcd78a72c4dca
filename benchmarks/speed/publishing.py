"""Committed to served: from the rename that commits a checkpoint to its first answer, polling included."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.speed import wire
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import dense_of, model_file
from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.running import Bodies, prepare
from benchmarks.speed.staging import NEW_SLOTS, serving_staged

COMMITS = {10: 6, 200: 5, 1024: 2}
"""Number of checkpoints to commit, by MiB of weights, once all slots exist."""

_PHASE_SECONDS = 0.13
"""Pauses between commits, not in step with the polling."""


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure every size; return the seconds of each commit, separately for those that created a slot."""
    rows: list[dict[str, Any]] = []
    measuring.progress.expect(len(COMMITS))
    for mebibytes, commits in COMMITS.items():
        bodies = prepare(measuring.work, dense_of(mebibytes), seeds=(0, 1))
        seconds = _measure(measuring, bodies, NEW_SLOTS + commits)
        for seed in (0, 1):
            model_file(measuring.work, bodies.model.name, seed).unlink()
        into_slots = seconds[NEW_SLOTS:]
        rows.append({"mebibytes": mebibytes, "seconds": into_slots, "seconds_with_new_slot": seconds[:NEW_SLOTS]})
        measuring.progress.step(f"{bodies.model.text}: {', '.join(f'{value:.2f} s' for value in into_slots)}")
    return {"rows": rows}


def _measure(measuring: Measuring, bodies: Bodies, commits: int) -> list[float]:
    with serving_staged(measuring.work, "publishing", bodies, 1 + commits) as (staged, server, client):
        seconds = []
        for turn in range(commits):
            time.sleep(_PHASE_SECONDS * (turn + 1))
            seconds.append(round(staged.commit_and_wait(client), 3))
        _check_step(server.target, bodies, 1 + commits)
    return seconds


def _check_step(target: str, bodies: Bodies, expected: int) -> None:
    reply = wire.call(target, wire.request(bodies.model, 1), timeout_seconds=30)
    if wire.version(reply) != str(expected):
        raise BenchmarkError(f"step {expected} is serving, but step {wire.version(reply)} answered")
