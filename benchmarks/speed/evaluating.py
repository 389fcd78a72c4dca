"""Evaluate over gRPC against ``model.evaluate`` in process: the same batches, interleaved, with equal losses."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from benchmarks.speed.measuring import Measuring
from benchmarks.speed.models import MODELS, BenchmarkModel
from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.running import prepare, running
from benchmarks.speed.workers import Worker

CASES = (("mlp", 32, 400), ("mlp", 256, 150), ("conv", 32, 150), ("conv", 256, 40))
"""Model, batch size, and number of batches scored at once."""

KERAS = "model.evaluate"

_ANSWER_SECONDS = 120.0
_LOSS_TOLERANCE = 1e-4


def run(measuring: Measuring) -> dict[str, Any]:
    """Measure this project's front ends and Keras; return examples per second."""
    rows: list[dict[str, Any]] = []
    measuring.progress.expect(measuring.rounds * len(CASES) * (1 + len(measuring.own_servers())))
    for name in dict.fromkeys(case[0] for case in CASES):
        rows += _measure(measuring, MODELS[name], [case[1:] for case in CASES if case[0] == name])
    return {"rows": rows}


def _measure(measuring: Measuring, model: BenchmarkModel, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    bodies = prepare(measuring.work, model)
    rates: dict[tuple[int, str], list[float]] = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(measuring, KERAS, "keras", model, str(bodies.file)))]
        servers = stack.enter_context(running(measuring.own_servers(), bodies, measuring.work / "evaluating"))
        workers += [
            stack.enter_context(_worker(measuring, one.server.name, "understudy", model, one.target)) for one in servers
        ]
        for rows, batches in cases:
            for turn in range(measuring.rounds + 1):
                losses = []
                for worker in workers:
                    question = {"rows": rows, "batches": batches if turn else 2}
                    answer = worker.ask(question, timeout_seconds=_ANSWER_SECONDS)
                    losses.append(answer["loss"])
                    if turn:  # the first one only traces
                        rate = rows * batches / answer["seconds"]
                        rates.setdefault((rows, worker.name), []).append(round(rate, 1))
                        measuring.progress.step(f"{model.name}, batch {rows}: {worker.name}: {rate:.0f} examples/s")
                _check_equal(model, rows, losses)
    return [
        {"model": model.name, "batch": rows, "scorer": name, "examples_per_second": all_}
        for (rows, name), all_ in rates.items()
    ]


def _worker(measuring: Measuring, name: str, kind: str, model: BenchmarkModel, place: str) -> Worker:
    log = measuring.work / f"scoring_{model.name}_{kind}.log"
    return Worker("scoring", kind, model.name, place, log=log, name=name)


def _check_equal(model: BenchmarkModel, rows: int, losses: list[float]) -> None:
    if not all(math.isclose(loss, losses[0], rel_tol=_LOSS_TOLERANCE) for loss in losses):
        raise BenchmarkError(f"{model.name}, batch {rows}: the losses differ: {losses}")
