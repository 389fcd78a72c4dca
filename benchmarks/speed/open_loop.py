"""Open loop: latencies of requests that arrive at random, at the same rates for every server.

Latency counts from the moment a request should have been sent. One Python process generates the load, and its own share
is the same for all; its own lateness is stored beside the figures.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.speed import h2load
from benchmarks.speed.figures import percentiles
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import MODELS
from benchmarks.speed.running import Bodies, RunningServer, prepare, running
from benchmarks.speed.workers import ARRIVALS_SECONDS, Worker

RATES = (300.0, 1200.0)
SECONDS = 4.0
PEAK_SECONDS = 0.7
PEAK_CONNECTIONS = 64


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure every server at every rate below its peak; return the figures."""
    bodies = prepare(measuring.work, MODELS["mlp"])
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        worker = stack.enter_context(Worker("arrivals", "mlp", log=measuring.work / "arrivals.log"))
        chosen = [server for server in measuring.servers() if not server.echoes]
        servers = stack.enter_context(running(chosen, bodies, measuring.work / "open_loop"))
        peaks = {one.server.name: _peak(one, bodies) for one in servers}
        measuring.progress.expect(measuring.rounds * len(RATES) * len(servers))
        for turn in range(measuring.rounds):
            for rate in RATES:
                for one in servers:
                    figures = _measure(worker, one, rate, peaks[one.server.name], turn)
                    rows.append(figures)
                    measuring.progress.step(f"{one.server.name}, {rate:.0f}/s: {_text(figures)}")
    return {"model": "mlp", "batch": 1, "seconds": SECONDS, "peaks": peaks, "rows": rows}


def _peak(one: RunningServer, bodies: Bodies) -> float:
    load = h2load.run(one.port, bodies.path(1), connections=PEAK_CONNECTIONS, seconds=PEAK_SECONDS)
    return round(load.requests_per_second, 1)


def _measure(worker: Worker, one: RunningServer, rate: float, peak: float, turn: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"server": one.server.name, "rate": rate, "share_of_peak": round(rate / peak, 3)}
    if rate > peak:
        return figures | {"above_peak": True}
    question = {"target": one.target, "rows": 1, "rate": rate, "seconds": SECONDS, "seed": turn}
    answer = worker.ask(question, timeout_seconds=SECONDS + ARRIVALS_SECONDS)
    return figures | {
        **percentiles(answer["latencies_ms"], p50_ms=50, p99_ms=99, p999_ms=99.9),
        "codes": answer["codes"],
        "generator_late_p99_ms": answer["late_p99_ms"],
    }


def _text(figures: dict[str, Any]) -> str:
    if "above_peak" in figures:
        return "above its peak"
    return f"p50 {figures['p50_ms']:.1f} ms, p99 {figures['p99_ms']:.1f} ms"
