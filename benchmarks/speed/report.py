"""Writes the results as Markdown and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed import goals, plot, results, table
from benchmarks.speed.figures import Spread

Result = dict[str, Any]

README, GOALS = "README.md", "goals.md"

_HEAD = """# What was measured

Medians of the rounds, in brackets the least and the most. [goals.md](goals.md) compares them with the goals.
Written by `python -m benchmarks.speed --render` from the JSON files beside it.
"""

_COLUMNS = {
    "requests_per_second": "requests/s",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "cpu_seconds_per_1000": "CPU s per 1000",
    "rss_mib": "RSS, MiB",
}


def write(folder: Path) -> None:
    """Write the tables, the goals and the plots of every result in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = results.load(folder)
    (folder / GOALS).write_text(goals.render(found))
    (folder / README).write_text("\n".join(_sections(found)))
    for name in ("closed_loop", "peers_closed_loop"):
        if name in found:
            plot.closed_loop(found[name], folder / f"{name}.svg")


def _sections(found: Mapping[str, Result]) -> list[str]:
    sections = [_HEAD]
    for name, result in found.items():
        sections.append(f"## {name}\n\n{_measured_on(result)}\n")
        if result["topic"] == "closed_loop":
            sections.append(f"![requests per second]({name}.svg)\n")
        sections += [_failures(result), _TABLES[result["topic"]](result)]
    return [section for section in sections if section]


def _measured_on(result: Result) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['began']}, commit {machine['commit']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; load before {' '.join(map(str, machine['load_before']))}; "
        f"{result['options']['rounds']} rounds; took {result['took_seconds']} s.\n"
        f"{versions}.\n`{machine['command']}`"
    )


def _failures(result: Result) -> str:
    return "".join(f"- not measured: {failure}\n" for failure in result.get("failures", ()))


def _closed_loop(result: Result) -> str:
    """Return a table for each model and batch size."""
    parts = []
    for model, text in result["models"].items():
        for batch in sorted({row["rows"] for row in result["rows"]}):
            rows = [row for row in result["rows"] if (row["model"], row["rows"]) == (model, batch)]
            if rows:
                parts.append(f"### {text}, batch {batch}\n\n{_cells(rows)}")
    at_rest = ", ".join(f"{name} {share:.1%}" for name, share in result["cpu_share_at_rest"].items())
    return "\n".join([*parts, f"CPU of one core taken at rest: {at_rest}.\n"])


def _cells(rows: list[dict[str, Any]]) -> str:
    lines = [
        [row["entrant"], str(row["connections"]), *(table.spread(Spread.of(row[column])) for column in _COLUMNS)]
        for row in sorted(rows, key=lambda row: (row["connections"], -Spread.of(row["requests_per_second"]).median))
    ]
    return table.markdown(("who", "connections", *_COLUMNS.values()), lines)


def _open_loop(result: Result) -> str:
    """Return a table with the median over the rounds of each server at each rate."""
    columns = ("p50_ms", "p99_ms", "p999_ms", "generator_late_p99_ms")
    grouped: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        grouped.setdefault((row["rate"], row["server"]), []).append(row)
    lines = []
    for (rate, server), rows in sorted(grouped.items()):
        cells = ["above its peak", *["-"] * 3]
        if "above_peak" not in rows[0]:
            cells = [table.spread(Spread.of([row[column] for row in rows])) for column in columns]
        lines.append([server, table.number(rate), f"{rows[0]['share_of_peak']:.0%}", *cells])
    header = ("server", "rate, /s", "of its peak", "p50, ms", "p99, ms", "p99.9, ms", "generator late p99, ms")
    return table.markdown(header, lines)


def _evaluating(result: Result) -> str:
    lines = [
        [row["scorer"], row["model"], str(row["batch"]), table.spread(Spread.of(row["examples_per_second"]))]
        for row in result["rows"]
    ]
    return table.markdown(("who", "model", "batch", "examples/s"), lines)


def _replicas(result: Result) -> str:
    lines = [
        [
            row.get("model", ""),
            str(row["replicas"]),
            str(row["batch"]),
            table.spread(Spread.of(row["examples_per_second"])),
        ]
        for row in result["rows"]
    ]
    return table.markdown(("model", "replicas", "batch", "examples/s"), lines)


def _publishing(result: Result) -> str:
    columns = ("seconds", "seconds_with_new_slot")
    lines = [
        [str(row["mebibytes"]), *(table.spread(Spread.of(row[column])) for column in columns)] for row in result["rows"]
    ]
    return table.markdown(("weights, MiB", "committed to served, s", "while slots are made, s"), lines)


def _swapping(result: Result) -> str:
    columns = ("rate", "p50_ms", "p99_ms", "max_ms", "steps_seen")
    lines = [
        [
            row["server"],
            "swapping" if row["swaps"] else "at rest",
            *(table.number(row[column]) for column in columns),
            _codes(row),
        ]
        for row in result["rows"]
    ]
    return table.markdown(("server", "phase", "rate, /s", "p50, ms", "p99, ms", "max, ms", "steps", "codes"), lines)


def _overload(result: Result) -> str:
    columns = ("peak", "offered", "goodput", "refusals_p99_ms", "answers_p99_ms")
    lines = [[row["server"], *(table.number(row[column]) for column in columns), _codes(row)] for row in result["rows"]]
    header = ("server", "peak, /s", "offered, /s", "goodput, /s", "refusals p99, ms", "answers p99, ms", "codes")
    return table.markdown(header, lines)


def _codes(row: dict[str, Any]) -> str:
    return ", ".join(f"{count} {code}" for code, count in row["codes"].items())


_TABLES: dict[str, Callable[[Result], str]] = {
    "closed_loop": _closed_loop,
    "open_loop": _open_loop,
    "evaluating": _evaluating,
    "replicas": _replicas,
    "publishing": _publishing,
    "swapping": _swapping,
    "overload": _overload,
}
