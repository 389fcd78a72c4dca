"""Overload: several times a server's peak load. Measures the goodput, and how fast the rest is refused.

The peak is a closed loop's. Then requests arrive at random at `TIMES` that rate. A second process sends occasional
requests and measures refusals, since the load generator is itself busy.

The servers have one half of the cores and the load generator the other, as if it ran on another machine: five times the
requests cost their sender five times the CPU, which would otherwise count as the server's loss.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.speed import h2load
from benchmarks.speed.figures import percentiles
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import MODELS
from benchmarks.speed.running import Bodies, RunningServer, prepare, running
from benchmarks.speed.workers import ARRIVALS_SECONDS, Worker

MODEL, ROWS = "deep", 32
TIMES = 5.0
PEAK_CONNECTIONS = 32
SECONDS = 4.0
PROBES_PER_SECOND = 30.0


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure this project's front ends; return the outcomes of the requests in each round."""
    bodies = prepare(measuring.work, MODELS[MODEL])
    rows: list[dict[str, Any]] = []
    servers = measuring.own_servers()
    measuring.progress.expect(measuring.rounds * len(servers))
    for_servers, for_load = _halves(sorted(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        with _only_on(for_servers):
            started = stack.enter_context(running(servers, bodies, measuring.work / "overload"))
        stack.enter_context(_only_on(for_load))
        load = stack.enter_context(Worker("arrivals", MODEL, log=measuring.work / "overload.log"))
        probe = stack.enter_context(Worker("arrivals", MODEL, log=measuring.work / "probe.log", name="probe"))
        for turn in range(measuring.rounds):
            for one in started:
                figures = _measure(one, bodies, load, probe, turn)
                rows.append(figures)
                measuring.progress.step(
                    f"{one.server.name}: {figures['goodput']:.0f} of {figures['peak']:.0f} requests/s, "
                    f"refusals p99 {figures['refusals_p99_ms']:.1f} ms"
                )
    return {
        "model": MODEL,
        "batch": ROWS,
        "times": TIMES,
        "seconds": SECONDS,
        "cores_of_servers": len(for_servers),
        "cores_of_load": len(for_load),
        "rows": rows,
    }


def _halves(cores: list[int]) -> tuple[list[int], list[int]]:
    """Return the cores of the servers and those of the load generator; a single core is shared."""
    return (cores, cores) if len(cores) == 1 else (cores[: len(cores) // 2], cores[len(cores) // 2 :])


@contextmanager
def _only_on(cores: Collection[int]) -> Iterator[None]:
    """Pin processes started meanwhile to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(one: RunningServer, bodies: Bodies, load: Worker, probe: Worker, turn: int) -> dict[str, Any]:
    closed = h2load.run(one.port, bodies.path(ROWS), connections=PEAK_CONNECTIONS, seconds=SECONDS)
    peak = closed.requests_per_second
    question = {"target": one.target, "rows": ROWS, "seconds": SECONDS, "seed": turn}
    load.tell(question | {"rate": TIMES * peak})
    probe.tell(question | {"rate": PROBES_PER_SECOND, "seed": turn + 1000})
    flooded = load.answer(timeout_seconds=SECONDS + ARRIVALS_SECONDS)
    probed = probe.answer(timeout_seconds=SECONDS + ARRIVALS_SECONDS)
    goodput = flooded["answered_per_second"] + probed["answered_per_second"]
    return {
        "server": one.server.name,
        "peak": round(peak, 1),
        "offered": round(TIMES * peak + PROBES_PER_SECOND, 1),
        "goodput": round(goodput, 1),
        **percentiles(probed["refusals_ms"], refusals_p99_ms=99),
        "refusals_seen": len(probed["refusals_ms"]),
        **percentiles(flooded["refusals_ms"], refusals_p99_ms_at_the_load=99),
        **percentiles(probed["latencies_ms"], answers_p99_ms=99),
        "codes": flooded["codes"],
    }
