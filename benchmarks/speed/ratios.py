"""Computes ratios from the rows of results. Every function returns None if the rows do not hold its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.speed.entrants import FUNCTION, STREAM_SUFFIX
from benchmarks.speed.evaluating import KERAS
from benchmarks.speed.figures import Spread, spread_of_ratios

FAST, DEFAULT = "understudy envoy", "understudy grpcio"
STREAM = f"{DEFAULT}{STREAM_SUFFIX}"
TRITON = ("triton 1 instance", "triton 2 instances")
PYTHON_SERVERS = ("kserve", "mlserver", "pytriton")

Rows = Sequence[dict[str, Any]]
Ratio = Callable[[Rows], Spread | None]


def _cell(rows: Rows, model: str, batch: int, connections: int) -> dict[str, dict[str, Any]]:
    return {
        row["entrant"]: row
        for row in rows
        if (row["model"], row["rows"], row["connections"]) == (model, batch, connections)
    }


def _best(cell: Mapping[str, dict[str, Any]], names: Sequence[str], column: str, *, least: bool) -> list[float] | None:
    """Return the values of the entrant with the best median."""
    found = [cell[name][column] for name in names if name in cell]
    choose = min if least else max
    return choose(found, key=lambda values: Spread.of(values).median) if found else None


def against(
    name: str, others: Sequence[str], batch: int, connections: int, column: str = "requests_per_second"
) -> Ratio:
    """Compare one with the best of others in one cell of the MLP: by rate, or by a column where less is better."""

    def reached(rows: Rows) -> Spread | None:
        cell = _cell(rows, "mlp", batch, connections)
        best = _best(cell, others, column, least=column != "requests_per_second")
        return spread_of_ratios(cell[name][column], best) if best and name in cell else None

    return reached


def over_cells(name: str, others: Sequence[str], connections: Sequence[int], *, least: bool) -> Ratio:
    """Compare the rates of one with the best of others in every cell with so many connections.

    The median over the cells counts, or the least; the spread is that of the cells.
    """

    def reached(rows: Rows) -> Spread | None:
        cells = {(row["model"], row["rows"], row["connections"]) for row in rows if row["connections"] in connections}
        found = []
        for model, batch, count in sorted(cells):
            cell = _cell(rows, model, batch, count)
            best = _best(cell, others, "requests_per_second", least=False)
            if best and name in cell:
                found.append(Spread.of(cell[name]["requests_per_second"]).median / Spread.of(best).median)
        if not found:
            return None
        return replace(Spread.of(found), median=min(found)) if least else Spread.of(found)

    return reached


def stream_against_unary(rows: Rows) -> Spread | None:
    """Return the best rate of streams over Triton's best, batch 1, any number of connections."""
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


def served_against_function(model: str, batch: int) -> Ratio:
    """Return the best served rate, over connections, relative to one in-process caller."""

    def reached(rows: Rows) -> Spread | None:
        served, in_process = (
            [row["requests_per_second"] for row in rows if _is(row, names, batch=batch, model=model)]
            for names in ((FAST, DEFAULT), (FUNCTION,))
        )
        return _ratio_of_best(served, in_process)

    return reached


def evaluated(model: str, batch: int) -> Ratio:
    """Compare the rate of examples scored over gRPC with Keras in process."""

    def reached(rows: Rows) -> Spread | None:
        rates = {
            row["scorer"]: row["examples_per_second"] for row in rows if (row["model"], row["batch"]) == (model, batch)
        }
        return spread_of_ratios(rates[DEFAULT], rates[KERAS]) if {DEFAULT, KERAS} <= rates.keys() else None

    return reached


def scaled(model: str, batch: int) -> Ratio:
    """Compare two replicas with one."""

    def reached(rows: Rows) -> Spread | None:
        measured = [row for row in rows if (row.get("model"), row["batch"]) == (model, batch)]
        rates = {row["replicas"]: row["examples_per_second"] for row in measured}
        return spread_of_ratios(rates[2], rates[1]) if {1, 2} <= rates.keys() else None

    return reached


def swapped(server: str) -> Ratio:
    """Compare the tail while weights are swapped with the tail at rest; infinite if a request failed."""

    def reached(rows: Rows) -> Spread | None:
        own = [row for row in rows if row["server"] == server]
        if not own:
            return None
        if any(set(row["codes"]) != {"OK"} for row in own):
            return Spread(median=math.inf, low=math.inf, high=math.inf)
        swapping, resting = ([row["p99_ms"] for row in own if row["swaps"] is swaps] for swaps in (True, False))
        return spread_of_ratios(swapping, resting)

    return reached


def committed(mebibytes: int) -> Ratio:
    """Return the seconds from a commit to the first answer."""

    def reached(rows: Rows) -> Spread | None:
        return next((Spread.of(row["seconds"]) for row in rows if row["mebibytes"] == mebibytes), None)

    return reached


def overloaded(server: str, column: str) -> Ratio:
    """Return goodput over the peak, or the spread of another column."""

    def reached(rows: Rows) -> Spread | None:
        own = [row for row in rows if row["server"] == server]
        if not own:
            return None
        if column == "goodput":
            return spread_of_ratios([row["goodput"] for row in own], [row["peak"] for row in own])
        values = [row[column] for row in own if row[column] is not None]
        return Spread.of(values) if values else None

    return reached
