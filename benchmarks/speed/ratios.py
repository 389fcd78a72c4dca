"""Computes ratios from the rows of results. Every function returns None if the rows do not hold its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.speed.entrants import FUNCTION, STREAM_SUFFIX
from benchmarks.speed.evaluating import KERAS
from benchmarks.speed.figures import Spread, spread_of_ratios

FAST, DEFAULT = "understudy envoy", "understudy grpcio"
STREAM = f"{DEFAULT}{STREAM_SUFFIX}"
TRITON = ("triton 1 instance", "triton 2 instances")
PYTHON_SERVERS = ("kserve", "mlserver", "pytriton")

RATE = "requests_per_second"

Rows = Sequence[dict[str, Any]]


def _cell(rows: Rows, model: str, batch: int, connections: int) -> dict[str, dict[str, Any]]:
    return {
        row["entrant"]: row
        for row in rows
        if (row["model"], row["rows"], row["connections"]) == (model, batch, connections)
    }


def _best(lists: Sequence[list[float]], column: str) -> list[float] | None:
    """Return the values with the best median: the highest rates, or the least of another column."""
    choose = max if column == RATE else min
    return choose(lists, key=lambda values: Spread.of(values).median, default=None)


def against(
    rows: Rows, name: str, others: Sequence[str], batch_and_connections: tuple[int, int], column: str = RATE
) -> Spread | None:
    """Compare one with the best of others in one cell of the MLP: by rate, or by a column where less is better."""
    cell = _cell(rows, "mlp", *batch_and_connections)
    best = _best([cell[other][column] for other in others if other in cell], column)
    return spread_of_ratios(cell[name][column], best) if best and name in cell else None


def over_cells(
    rows: Rows, name: str, others: Sequence[str], connections: Sequence[int], reached: Callable[[list[float]], float]
) -> Spread | None:
    """Compare the rates of one with the best of others in every cell with so many connections.

    What ``reached`` returns counts, such as the median over the cells, or the least; the spread is that of the cells.
    """
    cells = {(row["model"], row["rows"], row["connections"]) for row in rows if row["connections"] in connections}
    found = []
    for model, batch, count in sorted(cells):
        cell = _cell(rows, model, batch, count)
        best = _best([cell[other][RATE] for other in others if other in cell], RATE)
        if best and name in cell:
            found.append(Spread.of(cell[name][RATE]).median / Spread.of(best).median)
    return replace(Spread.of(found), median=reached(found)) if found else None


def stream_against_unary(rows: Rows) -> Spread | None:
    """Return the best rate of streams over Triton's best, batch 1, any number of connections."""
    return _of_best(rows, (STREAM,), TRITON, batch=1)


def served_against_function(
    rows: Rows, model: str, batch: int, column: str = RATE, servers: Sequence[str] = (FAST, DEFAULT)
) -> Spread | None:
    """Compare what is best over connections with one in-process caller: the rate, or a column where less is better."""
    return _of_best(rows, servers, (FUNCTION,), batch=batch, model=model, column=column)


def _of_best(
    rows: Rows, above: Sequence[str], below: Sequence[str], *, batch: int, model: str = "mlp", column: str = RATE
) -> Spread | None:
    own = [row for row in rows if (row["model"], row["rows"]) == (model, batch)]
    dividend, divisor = (
        _best([row[column] for row in own if row["entrant"] in names], column) for names in (above, below)
    )
    return spread_of_ratios(dividend, divisor) if dividend and divisor else None


def evaluated(rows: Rows, model: str, batch: int) -> Spread | None:
    """Compare the rate of examples scored over gRPC with Keras in process."""
    rates = {
        row["scorer"]: row["examples_per_second"] for row in rows if (row["model"], row["batch"]) == (model, batch)
    }
    return spread_of_ratios(rates[DEFAULT], rates[KERAS]) if {DEFAULT, KERAS} <= rates.keys() else None


def scaled(rows: Rows, model: str, batch: int) -> Spread | None:
    """Compare two replicas with one."""
    measured = [row for row in rows if (row.get("model"), row["batch"]) == (model, batch)]
    rates = {row["replicas"]: row["examples_per_second"] for row in measured}
    return spread_of_ratios(rates[2], rates[1]) if {1, 2} <= rates.keys() else None


def swapped(rows: Rows, server: str) -> Spread | None:
    """Compare the tail while weights are swapped with the tail at rest; infinite if a request failed."""
    own = [row for row in rows if row["server"] == server]
    if not own:
        return None
    if any(set(row["codes"]) != {"OK"} for row in own):
        return Spread(median=math.inf, low=math.inf, high=math.inf)
    swapping, resting = ([row["p99_ms"] for row in own if row["swaps"] is swaps] for swaps in (True, False))
    return spread_of_ratios(swapping, resting)


def committed(rows: Rows, mebibytes: int) -> Spread | None:
    """Return the seconds from a commit to the first answer."""
    return next((Spread.of(row["seconds"]) for row in rows if row["mebibytes"] == mebibytes), None)


def overloaded(rows: Rows, server: str, column: str) -> Spread | None:
    """Return goodput over the peak, or the spread of another column."""
    own = [row for row in rows if row["server"] == server]
    if not own:
        return None
    if column == "goodput":
        return spread_of_ratios([row["goodput"] for row in own], [row["peak"] for row in own])
    values = [row[column] for row in own if row[column] is not None]
    return Spread.of(values) if values else None
