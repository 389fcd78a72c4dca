"""Stores results, one JSON file per topic, and writes them as Markdown and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed import goals
from benchmarks.speed.figures import Spread, markdown, number, spread

Result = dict[str, Any]
Cell = Callable[[dict[str, Any]], str]

FOLDER = Path(__file__).parents[1] / "results" / "speed"
TRIALS = Path(__file__).parents[2] / "build" / "speed"
"""For partial or quick results, which are not kept; git ignores it."""

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

_MARKERS = "osD^vP*X<>h"
_PIXELS_PER_INCH = 75


def name_of(topic: str, *, with_peers: bool) -> str:
    """Return the name of a topic's result."""
    return f"peers_{topic}" if with_peers else topic


def save(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Write a result, with one row per line for readable diffs."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"    {json.dumps(_plain(row))}" for row in result["rows"])
    rest = {key: _plain(value) for key, value in result.items() if key != "rows"}
    head = json.dumps(rest, indent=2).removesuffix("\n}")
    (folder / f"{name}.json").write_text(f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n')


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every result by name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def _plain(value: Any) -> Any:
    """Return a value as JSON types; NaN becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def write(folder: Path) -> None:
    """Write the tables, the goals and the plots of every result in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = load(folder)
    (folder / GOALS).write_text(goals.render(found))
    (folder / README).write_text("\n".join(_sections(found)))
    for name in ("closed_loop", "peers_closed_loop"):
        if name in found:
            _plot(found[name], folder / f"{name}.webp")


def _sections(found: Mapping[str, Result]) -> list[str]:
    sections = [_HEAD]
    for name, result in found.items():
        sections.append(f"## {name}\n\n{_measured_on(result)}\n")
        if result["topic"] == "closed_loop":
            sections.append(f"![requests per second]({name}.webp)\n")
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
    for model, found in result.get("found_settings", {}).items():
        parts.append(f"- {model}: {', '.join(f'{name} {value}' for name, value in found.items())}")
    at_rest = ", ".join(f"{name} {share:.1%}" for name, share in result["cpu_share_at_rest"].items())
    return "\n".join([*parts, f"CPU of one core taken at rest: {at_rest}.\n"])


def _cells(rows: list[dict[str, Any]]) -> str:
    lines = [
        [row["entrant"], str(row["connections"]), *(spread(Spread.of(row[column])) for column in _COLUMNS)]
        for row in sorted(rows, key=lambda row: (row["connections"], -Spread.of(row["requests_per_second"]).median))
    ]
    return markdown(("who", "connections", *_COLUMNS.values()), lines)


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
            cells = [spread(Spread.of([row[column] for row in rows])) for column in columns]
        lines.append([server, number(rate), f"{rows[0]['share_of_peak']:.0%}", *cells])
    header = ("server", "rate, /s", "of its peak", "p50, ms", "p99, ms", "p99.9, ms", "generator late p99, ms")
    return markdown(header, lines)


def _column(name: str) -> Cell:
    """Return how to write a column: a spread over the rounds, a number, or a text."""

    def cell(row: dict[str, Any]) -> str:
        value = row.get(name, "")
        if isinstance(value, list):
            return spread(Spread.of(value))
        return number(value) if isinstance(value, float) else str(value)

    return cell


def _codes(row: dict[str, Any]) -> str:
    return ", ".join(f"{count} {code}" for code, count in row["codes"].items())


def _table(columns: Mapping[str, str | Cell]) -> Callable[[Result], str]:
    """Return how to write a result with a line for each row, by the heading of each column."""
    cells = [_column(column) if isinstance(column, str) else column for column in columns.values()]
    return lambda result: markdown(tuple(columns), [[cell(row) for cell in cells] for row in result["rows"]])


_TABLES: dict[str, Callable[[Result], str]] = {
    "closed_loop": _closed_loop,
    "real_models": _closed_loop,
    "open_loop": _open_loop,
    "evaluating": _table({"who": "scorer", "model": "model", "batch": "batch", "examples/s": "examples_per_second"}),
    "replicas": _table(
        {"model": "model", "replicas": "replicas", "batch": "batch", "examples/s": "examples_per_second"}
    ),
    "publishing": _table(
        {
            "weights, MiB": "mebibytes",
            "committed to served, s": "seconds",
            "while slots are made, s": "seconds_with_new_slot",
        }
    ),
    "swapping": _table(
        {
            "server": "server",
            "phase": lambda row: "swapping" if row["swaps"] else "at rest",
            "rate, /s": "rate",
            "p50, ms": "p50_ms",
            "p99, ms": "p99_ms",
            "max, ms": "max_ms",
            "steps": "steps_seen",
            "codes": _codes,
        }
    ),
    "overload": _table(
        {
            "server": "server",
            "peak, /s": "peak",
            "offered, /s": "offered",
            "goodput, /s": "goodput",
            "refusals p99, ms": "refusals_p99_ms",
            "answers p99, ms": "answers_p99_ms",
            "codes": _codes,
        }
    ),
}


def _plot(result: dict[str, Any], file: Path) -> None:
    """Draw requests per second over connections, with bars from the minimum to the maximum of the rounds."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    models = list(result["models"])
    batches = sorted({row["rows"] for row in result["rows"]})
    figure = Figure(figsize=(3.2 * len(batches), 2.9 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(batches), squeeze=False)
    names = sorted({row["entrant"] for row in result["rows"]})
    styles = {name: (f"C{place % 10}", _MARKERS[place % len(_MARKERS)]) for place, name in enumerate(names)}
    for model, line in zip(models, panels, strict=True):
        for batch, panel in zip(batches, line, strict=True):
            _draw(panel, result, model, batch, styles)
    handles = [Line2D([], [], color=color, marker=marker, label=name) for name, (color, marker) in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(file, dpi=_PIXELS_PER_INCH, pil_kwargs={"quality": 35, "method": 6})


def _draw(panel: Any, result: dict[str, Any], model: str, batch: int, styles: dict[str, tuple[str, str]]) -> None:
    for name, (color, marker) in styles.items():
        points = sorted(
            (row["connections"], Spread.of(row["requests_per_second"]))
            for row in result["rows"]
            if (row["model"], row["rows"], row["entrant"]) == (model, batch, name)
        )
        if points:
            rates = [spread.median for _, spread in points]
            bars = [
                [spread.median - spread.low for _, spread in points],
                [spread.high - spread.median for _, spread in points],
            ]
            width = 2.4 if name.startswith("understudy") else 1.0
            style = {"color": color, "marker": marker, "markersize": 4, "capsize": 2, "linewidth": width}
            panel.errorbar([count for count, _ in points], rates, bars, **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([1, 8, 32, 64], ["1", "8", "32", "64"])
    panel.set_title(f"{model}, batch {batch}", fontsize="medium")
    panel.set_xlabel("connections")
    panel.set_ylabel("requests/s")
    panel.grid(visible=True, alpha=0.2)
