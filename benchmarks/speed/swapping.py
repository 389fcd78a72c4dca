"""Swapping under load: the tail while 200 MB of weights are swapped every second, against the tail at rest.

The same Poisson load runs in both, in alternating phases of rest and of swapping. A checkpoint is committed by a
rename, so writing it costs nothing meanwhile; the measurement covers verifying, loading, warm-up and promotion.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.speed import h2load
from benchmarks.speed.figures import percentiles
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import dense_of
from benchmarks.speed.running import Bodies, prepare
from benchmarks.speed.servers import Server, frontend_options
from benchmarks.speed.staging import NEW_SLOTS, StagedCheckpoints, serving_staged
from benchmarks.speed.workers import ARRIVALS_SECONDS, Worker

MEBIBYTES = 200
SHARE_OF_PEAK = 0.4
PHASE_SECONDS = 5
PERIOD_SECONDS = 1.0
PEAK_CONNECTIONS = 8


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure this project's front ends; return the outcomes of the requests in each phase."""
    bodies = prepare(measuring.work, dense_of(MEBIBYTES), seeds=(0, 1))
    rows: list[dict[str, Any]] = []
    servers = measuring.own_servers()
    measuring.progress.expect(2 * measuring.rounds * len(servers))
    with Worker("arrivals", bodies.model.name, log=measuring.work / "swapping.log") as worker:
        for server in servers:
            rows += _measure(measuring, bodies, server, worker)
    return {"mebibytes": MEBIBYTES, "share_of_peak": SHARE_OF_PEAK, "phase_seconds": PHASE_SECONDS, "rows": rows}


def _measure(measuring: Measuring, bodies: Bodies, server: Server, worker: Worker) -> list[dict[str, Any]]:
    rows = []
    count, options = 1 + NEW_SLOTS + measuring.rounds * PHASE_SECONDS, frontend_options(server.name)
    served = serving_staged(measuring.work, "swapping", bodies, count, server.name, *options)
    with served as (staged, running, client):
        for _ in range(NEW_SLOTS):
            staged.commit_and_wait(client)
        load = h2load.run(running.port, bodies.path(1), connections=PEAK_CONNECTIONS, seconds=2)
        rate = SHARE_OF_PEAK * load.requests_per_second
        for turn in range(measuring.rounds):
            for swaps in (False, True):
                figures = _phase(worker, running.target, rate, turn, staged if swaps else None)
                staged.settle(client)
                rows.append({"server": server.name, "swaps": swaps, "rate": round(rate, 1), **figures})
                measuring.progress.step(
                    f"{server.name}, {'swapping' if swaps else 'at rest'}: p50 {figures['p50_ms']:.1f} ms, "
                    f"p99 {figures['p99_ms']:.1f} ms, {figures['steps_seen']} steps, {figures['codes']}"
                )
    return rows


def _phase(worker: Worker, target: str, rate: float, turn: int, staged: StagedCheckpoints | None) -> dict[str, Any]:
    worker.tell({"target": target, "rows": 1, "rate": rate, "seconds": PHASE_SECONDS, "seed": turn})
    if staged is not None:
        began = time.monotonic()
        for number in range(PHASE_SECONDS):
            staged.commit()
            time.sleep(max(0.0, began + (number + 1) * PERIOD_SECONDS - time.monotonic()))
    answer = worker.answer(timeout_seconds=PHASE_SECONDS + ARRIVALS_SECONDS)
    return {
        **percentiles(answer["latencies_ms"], p50_ms=50, p99_ms=99),
        "max_ms": max(answer["latencies_ms"]),
        "steps_seen": len(answer["versions"]),
        "codes": answer["codes"],
    }
