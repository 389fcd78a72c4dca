"""The goals, each a ratio within one run, and the ratios reached."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.speed import ratios
from benchmarks.speed.figures import Spread, markdown, spread
from benchmarks.speed.ratios import DEFAULT, FAST, PYTHON_SERVERS, TRITON

Results = Mapping[str, dict[str, Any]]
"""By name, as `benchmarks.speed.report.load` gives them."""

BESIDE_PEERS = "peers_closed_loop"


@dataclass(frozen=True)
class Goal:
    """One line of the table: ``reached`` returns the ratio from the rows of a result and ``of``, or None."""

    text: str
    wanted: float
    result: str
    reached: Callable[..., Spread | None]
    of: tuple[Any, ...] = ()
    at_most: bool = False


def render(results: Results) -> str:
    """Return the table of goals, in Markdown."""
    lines = []
    for goal in GOALS:
        result = results.get(goal.result)
        reached = goal.reached(result["rows"], *goal.of) if result else None
        sign = "≤" if goal.at_most else "≥"
        lines.append([goal.text, f"{sign} {goal.wanted}", *_outcome(goal, reached), f"`{_command(goal.result)}`"])
    head = "# Goals\n\nEach is a ratio within one run: of the medians, and in brackets the least and the most of one "
    note = "round.\nWritten by `python -m benchmarks.speed --render` from the results beside it.\n\n"
    return head + note + markdown(("what", "goal", "reached", "", "repeated by"), lines)


def _outcome(goal: Goal, reached: Spread | None) -> tuple[str, str]:
    if reached is None:
        return "not measured", ""
    met = reached.median <= goal.wanted if goal.at_most else reached.median >= goal.wanted
    return spread(reached), "yes" if met else "no"


def _command(result: str) -> str:
    topic = result.removeprefix("peers_")
    return f"make {'bench-peers' if topic != result else 'bench'} TOPIC={topic}"


def _closed_loop() -> Iterator[Goal]:
    for batch, connections, wanted in ((1, 64, 1.3), (1, 8, 1.1), (1, 1, 1.1), (32, 64, 1.2)):
        text = f"mlp, Predict, batch {batch}, {connections} connections: {FAST} ÷ best Triton"
        yield Goal(text, wanted, BESIDE_PEERS, ratios.against, (FAST, TRITON, (batch, connections)))
    text = f"mlp, p99, batch 1, 64 connections: {FAST} ÷ best Triton"
    yield Goal(text, 1.0, BESIDE_PEERS, ratios.against, (FAST, TRITON, (1, 64), "p99_ms"), at_most=True)
    for batch, connections in itertools.product((1, 32, 256), (8, 32, 64)):
        text = f"mlp, Predict, batch {batch}, {connections} connections: {DEFAULT} ÷ best of KServe, MLServer, pytriton"
        yield Goal(text, 2.0, BESIDE_PEERS, ratios.against, (DEFAULT, PYTHON_SERVERS, (batch, connections)))
    text = "mlp, PredictStream over grpcio, 8 streams ÷ best Triton, unary, batch 1"
    yield Goal(text, 1.0, BESIDE_PEERS, ratios.stream_against_unary)
    for server, counts, what, reached, wanted in (
        (FAST, (1, 8, 32), "median", statistics.median, 1.2),
        (FAST, (1, 8, 32), "least", min, 1.0),
        (DEFAULT, (1, 8), "least", min, 0.95),
    ):
        text = f"six real models without options, {', '.join(map(str, counts))} connections: {server} ÷ best Triton, "
        of = (server, TRITON, counts, reached)
        yield Goal(f"{text}{what} of the cells", wanted, "peers_real_models", ratios.over_cells, of)


def _of_each_batch() -> Iterator[Goal]:
    for models, text, wanted, result, ratio in (
        (
            ("mlp", "conv"),
            "examples/s served at best ÷ function in process",
            0.95,
            "closed_loop",
            ratios.served_against_function,
        ),
        (("mlp", "conv"), "Evaluate over gRPC ÷ model.evaluate in process", 1.0, "evaluating", ratios.evaluated),
        (("conv", "deep"), "two replicas ÷ one, one intra-op thread each", 1.9, "replicas", ratios.scaled),
    ):
        for model, batch in itertools.product(models, (32, 256)):
            yield Goal(f"{model}, batch {batch}: {text}", wanted, result, ratio, (model, batch))
    for model, server in itertools.product(("mlp", "conv"), (FAST, DEFAULT)):
        text = f"{model}, batch 32: CPU time of an example, {server} at best ÷ function in process"
        of = (model, 32, "cpu_seconds_per_1000", (server,))
        yield Goal(text, 1.3, "closed_loop", ratios.served_against_function, of, at_most=True)


def _under_stress() -> Iterator[Goal]:
    text = "committed to served, 200 MB, seconds"
    yield Goal(text, 1.0, "publishing", ratios.committed, (200,), at_most=True)
    for server in (DEFAULT, FAST):
        text = f"{server}: p99 while 200 MB are swapped every second ÷ at rest"
        yield Goal(text, 1.25, "swapping", ratios.swapped, (server,), at_most=True)
        text = f"{server}: goodput at five times the load ÷ peak"
        yield Goal(text, 0.9, "overload", ratios.overloaded, (server, "goodput"))
        text = f"{server}: p99 of refusals meanwhile, ms"
        yield Goal(text, 10.0, "overload", ratios.overloaded, (server, "refusals_p99_ms"), at_most=True)


GOALS = [*_closed_loop(), *_of_each_batch(), *_under_stress()]
