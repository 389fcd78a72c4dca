"""Overload: several times the load that a server can bear. What it still answers, and how fast it refuses the rest.

The peak is a closed loop's. Then requests arrive at random at `TIMES` that rate; a second process asks now and then
and tells how long refusals take, since the one that makes the load is itself busy.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.speed import h2load
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import MODELS
from benchmarks.speed.running import Bodies, RunningServer, prepare, running
from benchmarks.speed.workers import Worker

MODEL, ROWS = "deep", 32
TIMES = 5.0
PEAK_CONNECTIONS = 32
SECONDS = 4.0
PROBES_PER_SECOND = 30.0

_ANSWER_SECONDS = 90.0


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure this project's front ends; return what became of the requests in each round."""
    bodies = prepare(measuring.work, MODELS[MODEL])
    rows: list[dict[str, Any]] = []
    servers = measuring.own_servers()
    measuring.progress.expect(measuring.rounds * len(servers))
    with ExitStack() as stack:
        load = stack.enter_context(Worker("arrivals", MODEL, log=measuring.work / "overload.log"))
        probe = stack.enter_context(Worker("arrivals", MODEL, log=measuring.work / "probe.log", name="probe"))
        started = stack.enter_context(running(servers, bodies, measuring.work / "overload"))
        for turn in range(measuring.rounds):
            for one in started:
                figures = _measure(one, bodies, load, probe, turn)
                rows.append(figures)
                measuring.progress.step(
                    f"{one.server.name}: {figures['goodput']:.0f} of {figures['peak']:.0f} requests/s, "
                    f"refusals p99 {figures['refusals_p99_ms']:.1f} ms"
                )
    return {"model": MODEL, "batch": ROWS, "times": TIMES, "seconds": SECONDS, "rows": rows}


def _measure(one: RunningServer, bodies: Bodies, load: Worker, probe: Worker, turn: int) -> dict[str, Any]:
    closed = h2load.run(one.port, bodies.path(ROWS), connections=PEAK_CONNECTIONS, seconds=SECONDS / 2)
    peak = closed.requests_per_second
    question = {"target": one.target, "rows": ROWS, "seconds": SECONDS, "seed": turn}
    load.tell(question | {"rate": TIMES * peak})
    probe.tell(question | {"rate": PROBES_PER_SECOND, "seed": turn + 1000})
    flooded = load.answer(timeout_seconds=SECONDS + _ANSWER_SECONDS)
    probed = probe.answer(timeout_seconds=SECONDS + _ANSWER_SECONDS)
    goodput = flooded["answered_per_second"] + probed["answered_per_second"]
    return {
        "server": one.server.name,
        "peak": round(peak, 1),
        "offered": round(TIMES * peak + PROBES_PER_SECOND, 1),
        "goodput": round(goodput, 1),
        "refusals_p99_ms": _p99(probed["refusals_ms"]),
        "refusals_seen": len(probed["refusals_ms"]),
        "refusals_p99_ms_at_the_load": _p99(flooded["refusals_ms"]),
        "answers_p99_ms": _p99(probed["latencies_ms"]),
        "codes": flooded["codes"],
    }


def _p99(milliseconds: list[float]) -> float:
    """Return what 99 in a hundred are not above; not a number where there are none."""
    return round(float(np.percentile(milliseconds, 99)), 3) if milliseconds else float("nan")
