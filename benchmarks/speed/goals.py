"""The goals, each a ratio within one run, and what was reached of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.speed import table
from benchmarks.speed.entrants import FUNCTION, STREAM_SUFFIX
from benchmarks.speed.evaluating import KERAS
from benchmarks.speed.figures import Spread, spread_of_ratios

Results = Mapping[str, dict[str, Any]]
"""By name, as `benchmarks.speed.results.load` gives them."""

FAST, DEFAULT = "understudy envoy", "understudy grpcio"
STREAM = f"{DEFAULT}{STREAM_SUFFIX}"
TRITON = ("triton 1 instance", "triton 2 instances")
PYTHON_SERVERS = ("kserve", "mlserver", "pytriton")

CLOSED, BESIDE_PEERS = "closed_loop", "peers_closed_loop"

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One line of the table.

    Attributes:
        text: What is compared.
        wanted: The ratio that is wanted.
        at_most: Whether that is the most there may be, not the least.
        result: The name of the result it is read from.
        reached: Returns the ratio from the rows of that result; None if they do not hold it.
    """

    text: str
    wanted: float
    result: str
    reached: Callable[[Rows], Spread | None]
    at_most: bool = False


def render(results: Results) -> str:
    """Return the table of goals, in Markdown."""
    lines = []
    for goal in GOALS:
        result = results.get(goal.result)
        reached = goal.reached(result["rows"]) if result else None
        sign = "≤" if goal.at_most else "≥"
        lines.append([goal.text, f"{sign} {goal.wanted}", *_verdict(goal, reached), f"`{_command(goal.result)}`"])
    head = "# Goals\n\nEach is a ratio within one run: of the medians, and in brackets the least and the most of one "
    note = "round.\nWritten by `python -m benchmarks.speed --render` from the results beside it.\n\n"
    return head + note + table.markdown(("what", "goal", "reached", "", "repeated by"), lines)


def _verdict(goal: Goal, reached: Spread | None) -> tuple[str, str]:
    if reached is None:
        return "not measured", ""
    met = reached.median <= goal.wanted if goal.at_most else reached.median >= goal.wanted
    return table.spread(reached), "yes" if met else "no"


def _command(result: str) -> str:
    topic = result.removeprefix("peers_")
    return f"make {'bench-peers' if topic != result else 'bench'} TOPIC={topic}"


def _cell(rows: Rows, model: str, batch: int, connections: int) -> dict[str, dict[str, Any]]:
    return {
        row["entrant"]: row
        for row in rows
        if (row["model"], row["rows"], row["connections"]) == (model, batch, connections)
    }


def _best(cell: Mapping[str, dict[str, Any]], names: Sequence[str], column: str, *, least: bool) -> list[float] | None:
    """Return the values of the one of several entrants with the best median."""
    found = [cell[name][column] for name in names if name in cell]
    choose = min if least else max
    return choose(found, key=lambda values: Spread.of(values).median) if found else None


def _against(
    name: str, others: Sequence[str], batch: int, connections: int, column: str = "requests_per_second"
) -> Callable[[Rows], Spread | None]:
    def reached(rows: Rows) -> Spread | None:
        cell = _cell(rows, "mlp", batch, connections)
        best = _best(cell, others, column, least=column != "requests_per_second")
        return spread_of_ratios(cell[name][column], best) if best and name in cell else None

    return reached


def _stream_against_unary(rows: Rows) -> Spread | None:
    """Return what streams give at best over what Triton gives at best, batch 1, whatever the connections."""
    of_streams, of_triton = (
        [row["requests_per_second"] for row in rows if _is(row, names, batch=1)] for names in ((STREAM,), TRITON)
    )
    return _ratio_of_best(of_streams, of_triton)


def _is(row: dict[str, Any], names: Sequence[str], *, batch: int, model: str = "mlp") -> bool:
    return row["model"] == model and row["rows"] == batch and row["entrant"] in names


def _ratio_of_best(above: Sequence[list[float]], below: Sequence[list[float]]) -> Spread | None:
    if not above or not below:
        return None
    best = [max(lists, key=lambda values: Spread.of(values).median) for lists in (above, below)]
    return spread_of_ratios(best[0], best[1])


def _served_against_function(model: str, batch: int) -> Callable[[Rows], Spread | None]:
    """Return the ratio of what is served over the connections that give most to what one caller gets in process."""

    def reached(rows: Rows) -> Spread | None:
        served, in_process = (
            [row["requests_per_second"] for row in rows if _is(row, names, batch=batch, model=model)]
            for names in ((FAST, DEFAULT), (FUNCTION,))
        )
        return _ratio_of_best(served, in_process)

    return reached


def _evaluated(model: str, batch: int) -> Callable[[Rows], Spread | None]:
    def reached(rows: Rows) -> Spread | None:
        rates = {
            row["scorer"]: row["examples_per_second"] for row in rows if (row["model"], row["batch"]) == (model, batch)
        }
        return spread_of_ratios(rates[DEFAULT], rates[KERAS]) if {DEFAULT, KERAS} <= rates.keys() else None

    return reached


def _scaled(batch: int) -> Callable[[Rows], Spread | None]:
    def reached(rows: Rows) -> Spread | None:
        rates = {row["replicas"]: row["examples_per_second"] for row in rows if row["batch"] == batch}
        return spread_of_ratios(rates[2], rates[1])

    return reached


def _swapped(server: str) -> Callable[[Rows], Spread | None]:
    """Return the ratio of the tails; none where a request failed, since then no ratio counts."""

    def reached(rows: Rows) -> Spread | None:
        own = [row for row in rows if row["server"] == server]
        if not own or any(set(row["codes"]) != {"OK"} for row in own):
            return None
        swapping, resting = ([row["p99_ms"] for row in own if row["swaps"] is swaps] for swaps in (True, False))
        return spread_of_ratios(swapping, resting)

    return reached


def _committed(mebibytes: int) -> Callable[[Rows], Spread | None]:
    def reached(rows: Rows) -> Spread | None:
        return next((Spread.of(row["seconds"]) for row in rows if row["mebibytes"] == mebibytes), None)

    return reached


def _overloaded(server: str, column: str) -> Callable[[Rows], Spread | None]:
    def reached(rows: Rows) -> Spread | None:
        own = [row for row in rows if row["server"] == server]
        if not own:
            return None
        if column == "goodput":
            return spread_of_ratios([row["goodput"] for row in own], [row["peak"] for row in own])
        values = [row[column] for row in own if row[column] is not None]
        return Spread.of(values) if values else None

    return reached


def _goals() -> list[Goal]:
    goals = [
        Goal(
            text=f"Predict, batch {batch}, {connections} connections: {FAST} ÷ best Triton",
            wanted=wanted,
            result=BESIDE_PEERS,
            reached=_against(FAST, TRITON, batch, connections),
        )
        for batch, connections, wanted in ((1, 64, 1.3), (1, 8, 1.1), (1, 1, 1.1), (32, 64, 1.2))
    ]
    goals.append(
        Goal(
            text=f"p99, batch 1, 64 connections: {FAST} ÷ best Triton",
            wanted=1.0,
            at_most=True,
            result=BESIDE_PEERS,
            reached=_against(FAST, TRITON, 1, 64, "p99_ms"),
        )
    )
    goals += [
        Goal(
            text=f"Predict, batch {batch}, {connections} connections: {DEFAULT} ÷ best of KServe, MLServer, pytriton",
            wanted=2.0,
            result=BESIDE_PEERS,
            reached=_against(DEFAULT, PYTHON_SERVERS, batch, connections),
        )
        for batch in (1, 32, 256)
        for connections in (8, 32, 64)
    ]
    goals.append(
        Goal(
            text="PredictStream over grpcio, 8 streams ÷ best Triton, unary, batch 1",
            wanted=1.0,
            result=BESIDE_PEERS,
            reached=_stream_against_unary,
        )
    )
    goals += [
        Goal(
            text=f"{model}, batch {batch}: examples/s served at best ÷ function in process",
            wanted=0.95,
            result=CLOSED,
            reached=_served_against_function(model, batch),
        )
        for model in ("mlp", "conv")
        for batch in (32, 256)
    ]
    goals += [
        Goal(
            text=f"{model}, batch {batch}: Evaluate over gRPC ÷ model.evaluate in process",
            wanted=1.0,
            result="evaluating",
            reached=_evaluated(model, batch),
        )
        for model in ("mlp", "conv")
        for batch in (32, 256)
    ]
    goals += [
        Goal(
            text=f"conv, batch {batch}: two replicas ÷ one, one intra-op thread each",
            wanted=1.9,
            result="replicas",
            reached=_scaled(batch),
        )
        for batch in (32, 256)
    ]
    goals.append(
        Goal(
            text="committed to served, 200 MB, seconds",
            wanted=1.0,
            at_most=True,
            result="publishing",
            reached=_committed(200),
        )
    )
    for server in (DEFAULT, FAST):
        goals += [
            Goal(
                text=f"{server}: p99 while 200 MB are swapped every second ÷ at rest",
                wanted=1.25,
                at_most=True,
                result="swapping",
                reached=_swapped(server),
            ),
            Goal(
                text=f"{server}: goodput at five times the load ÷ peak",
                wanted=0.9,
                result="overload",
                reached=_overloaded(server, "goodput"),
            ),
            Goal(
                text=f"{server}: p99 of refusals meanwhile, ms",
                wanted=10.0,
                at_most=True,
                result="overload",
                reached=_overloaded(server, "refusals_p99_ms"),
            ),
        ]
    return goals


GOALS = _goals()
