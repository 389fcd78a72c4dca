"""Scaling over replicas: two logical CPUs against one, each operation on one thread.

Measured in this process's evaluator, which suffices for the goal: over the wire the load generator would need its own
core.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import MODELS, BenchmarkModel
from benchmarks.speed.running import Bodies, prepare
from benchmarks.speed.workers import Worker

COMPARED = ("conv", "deep")
"""``conv`` takes 1 ms for 32 examples, of which a call's own work is a part; ``deep`` takes 17 ms."""

REPLICAS = (1, 2)
ROWS = (32, 256)
CALLERS = 2
"""One request computes while the next one waits."""

_ANSWER_SECONDS = 60.0


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure every number of replicas in interleaved rounds, one model after the other; return examples per second."""
    rows = [row for name in COMPARED for row in _measure(measuring, MODELS[name])]
    return {"models": {name: MODELS[name].text for name in COMPARED}, "rows": rows}


def _measure(measuring: Measuring, model: BenchmarkModel) -> list[dict[str, Any]]:
    bodies = prepare(measuring.work, model)
    rates: dict[tuple[int, int], list[float]] = {}
    measuring.progress.expect(measuring.rounds * len(ROWS) * len(REPLICAS))
    with ExitStack() as stack:
        workers = {count: stack.enter_context(_worker(measuring, bodies, count)) for count in REPLICAS}
        for _ in range(measuring.rounds):
            for rows in ROWS:
                for count, worker in workers.items():
                    question = {"rows": rows, "callers": CALLERS, "seconds": measuring.seconds}
                    answer = worker.ask(question, timeout_seconds=measuring.seconds + _ANSWER_SECONDS)
                    rate = rows * len(answer["latencies_ms"]) / answer["seconds"]
                    rates.setdefault((rows, count), []).append(round(rate, 1))
                    measuring.progress.step(f"{model.name}, batch {rows}, {count} replicas: {rate:.0f} examples/s")
    return [
        {"model": model.name, "batch": rows, "replicas": count, "examples_per_second": all_}
        for (rows, count), all_ in rates.items()
    ]


def _worker(measuring: Measuring, bodies: Bodies, replicas: int) -> Worker:
    place = measuring.work / f"{bodies.model.name}_replicas_{replicas}"
    settings = (f"logical_cpus={replicas}", "intra_op_threads=1", f"inter_op_threads={replicas}", "max_batch_size=256")
    arguments = ("evaluator", bodies.model.name, str(bodies.file), str(place), *settings)
    return Worker("in_process", *arguments, log=place.with_suffix(".log"), name=f"{replicas} replicas")
