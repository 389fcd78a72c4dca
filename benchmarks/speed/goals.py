"""The goals, each a ratio within one run, and the ratios reached."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.speed import ratios
from benchmarks.speed.figures import Spread, markdown, spread
from benchmarks.speed.ratios import DEFAULT, FAST, PYTHON_SERVERS, TRITON, Ratio

Results = Mapping[str, dict[str, Any]]
"""By name, as `benchmarks.speed.report.load` gives them."""

CLOSED, BESIDE_PEERS = "closed_loop", "peers_closed_loop"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One line of the table.

    Attributes:
        text: What is compared.
        wanted: The goal for the ratio.
        at_most: Whether the goal is an upper bound.
        result: The name of the result that holds it.
        reached: Returns the ratio from the rows of that result; None if they do not hold it.
    """

    text: str
    wanted: float
    result: str
    reached: Ratio
    at_most: bool = False


def render(results: Results) -> str:
    """Return the table of goals, in Markdown."""
    lines = []
    for goal in GOALS:
        result = results.get(goal.result)
        reached = goal.reached(result["rows"]) if result else None
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


def _goals() -> list[Goal]:
    goals = [
        Goal(
            text=f"mlp, Predict, batch {batch}, {connections} connections: {FAST} ÷ best Triton",
            wanted=wanted,
            result=BESIDE_PEERS,
            reached=ratios.against(FAST, TRITON, batch, connections),
        )
        for batch, connections, wanted in ((1, 64, 1.3), (1, 8, 1.1), (1, 1, 1.1), (32, 64, 1.2))
    ]
    goals.append(
        Goal(
            text=f"mlp, p99, batch 1, 64 connections: {FAST} ÷ best Triton",
            wanted=1.0,
            at_most=True,
            result=BESIDE_PEERS,
            reached=ratios.against(FAST, TRITON, 1, 64, "p99_ms"),
        )
    )
    goals += [
        Goal(
            text=f"mlp, Predict, batch {batch}, {connections} connections: {DEFAULT} "
            "÷ best of KServe, MLServer, pytriton",
            wanted=2.0,
            result=BESIDE_PEERS,
            reached=ratios.against(DEFAULT, PYTHON_SERVERS, batch, connections),
        )
        for batch in (1, 32, 256)
        for connections in (8, 32, 64)
    ]
    goals.append(
        Goal(
            text="mlp, PredictStream over grpcio, 8 streams ÷ best Triton, unary, batch 1",
            wanted=1.0,
            result=BESIDE_PEERS,
            reached=ratios.stream_against_unary,
        )
    )
    goals += [
        Goal(
            text=f"six real models without options, {', '.join(map(str, counts))} connections: "
            f"{server} ÷ best Triton, {what}",
            wanted=wanted,
            result="peers_real_models",
            reached=ratios.over_cells(server, TRITON, counts, least=what == "least of the cells"),
        )
        for server, counts, what, wanted in (
            (FAST, (1, 8, 32), "median of the cells", 1.2),
            (FAST, (1, 8, 32), "least of the cells", 1.0),
            (DEFAULT, (1, 8), "least of the cells", 0.95),
        )
    ]
    small, large = ("mlp", "conv"), ("conv", "deep")
    against_function = "examples/s served at best ÷ function in process"
    goals += _each(small, against_function, 0.95, CLOSED, ratios.served_against_function)
    goals += _each(small, "Evaluate over gRPC ÷ model.evaluate in process", 1.0, "evaluating", ratios.evaluated)
    goals += _each(large, "two replicas ÷ one, one intra-op thread each", 1.9, "replicas", ratios.scaled)
    goals.append(
        Goal(
            text="committed to served, 200 MB, seconds",
            wanted=1.0,
            at_most=True,
            result="publishing",
            reached=ratios.committed(200),
        )
    )
    for server in (DEFAULT, FAST):
        goals += [
            Goal(
                text=f"{server}: p99 while 200 MB are swapped every second ÷ at rest",
                wanted=1.25,
                at_most=True,
                result="swapping",
                reached=ratios.swapped(server),
            ),
            Goal(
                text=f"{server}: goodput at five times the load ÷ peak",
                wanted=0.9,
                result="overload",
                reached=ratios.overloaded(server, "goodput"),
            ),
            Goal(
                text=f"{server}: p99 of refusals meanwhile, ms",
                wanted=10.0,
                at_most=True,
                result="overload",
                reached=ratios.overloaded(server, "refusals_p99_ms"),
            ),
        ]
    return goals


def _each(
    models: tuple[str, ...], text: str, wanted: float, result: str, ratio: Callable[[str, int], Ratio]
) -> Iterator[Goal]:
    """Yield a goal for each model and batch size."""
    for model, batch in itertools.product(models, (32, 256)):
        yield Goal(text=f"{model}, batch {batch}: {text}", wanted=wanted, result=result, reached=ratio(model, batch))


GOALS = _goals()
