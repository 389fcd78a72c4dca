"""Shows results: tables with colour on a terminal, plain columns elsewhere, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from understudy.clients import Evaluation


def printable(text: str, keep: str = "") -> str:
    """Return a text without what would control the terminal or begin a line: servers and files may say anything."""
    return "".join(each if _is_shown(each) or each in keep else "\N{REPLACEMENT CHARACTER}" for each in text)


def _is_shown(character: str) -> bool:
    """Return whether a character is shown as it is: also spaces of other widths, such as those that do not break."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def say(text: str, *, err: bool = False) -> None:
    """Show a line that may quote a server or a file."""
    click.echo(printable(text), err=err)


def csv_cell(cell: Any) -> Any:
    """Return a cell for a CSV file: a text that a spreadsheet would take for a formula begins with an apostrophe."""
    if not isinstance(cell, str):
        return cell
    text = printable(cell, keep="\t\r\n")
    if not text.startswith(_FORMULAS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Show rows under headings."""
    headings, rows = [*map(printable, headings)], [[*map(printable, row)] for row in rows]
    if title:
        say(title)
    if sys.stdout.isatty():
        _print_rich(headings, rows)
        return
    widths = _widths(headings, rows)
    for row in (headings, *rows):
        padded = (cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def print_json(value: Any) -> None:
    """Show a value as one line of JSON. NaN and infinities, which JSON lacks, are strings, as in protobuf's JSON."""
    click.echo(json.dumps(plain(value), allow_nan=False))


def evaluation_as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return an entry of the ledger as an object of JSON."""
    return {**dataclasses.asdict(evaluation), "recorded_at": evaluation.recorded_at.isoformat()}


UNDEFINED = "undefined"
"""Shown in the place of the value of a metric that is undefined on its examples."""


def formatted_metrics(scored: Any, *, with_intervals: bool = False) -> str:
    """Return the metrics of an evaluation or a slice as text, the loss first, also those that are undefined."""
    intervals = scored.intervals if with_intervals else {}
    return "  ".join(
        f"{name} {with_interval(scored.metrics[name], intervals.get(name)) if name in scored.metrics else UNDEFINED}"
        for name in ordered((*scored.metrics, *scored.undefined))
    )


def notes_of(scored: Any) -> tuple[str, ...]:
    """Return the notes of an evaluation or a slice, and why metrics are undefined: a sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name in ordered(scored.undefined):
        by_reason.setdefault(scored.undefined[name], []).append(name)
    said = (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} undefined: {reason}"
        for reason, names in by_reason.items()
    )
    return (*scored.notes, *said)


def formatted_slice(part: Any) -> str:
    """Return the metrics of a slice as text, with its notes."""
    return "; ".join(filter(None, (formatted_metrics(part, with_intervals=True), *notes_of(part))))


def counted(examples: int) -> str:
    """Return a number of examples with its noun."""
    return f"{examples} example{'' if examples == 1 else 's'}"


def ordered(metrics: Iterable[str]) -> list[str]:
    """Return the names of metrics, the loss first."""
    return sorted(metrics, key=lambda name: (name != "loss", name))


def with_interval(value: float, interval: Any, *, sign: str = "") -> str:
    """Return a number and the interval around it, an object with ``low`` and ``high``, or None."""
    text = f"{value:{sign}.6g}"
    return text if interval is None else f"{text} [{interval.low:{sign}.4g}, {interval.high:{sign}.4g}]"


def print_slices(slices: Sequence[Any]) -> None:
    """Show a table of `understudy.clients.SliceScore`s, if there are any.

    It has a column for each metric, or a row where a terminal is too narrow for that.
    """
    if not slices:
        return
    names = ordered({name for part in slices for name in (*part.metrics, *part.undefined)})
    headings = ("slice", "examples", *names)
    rows = [(part.name, str(part.examples), *(_value_of(part, name) for name in names)) for part in slices]
    if sys.stdout.isatty() and not _fits(headings, rows):
        headings = ("slice", "examples", "metric", "value")
        rows = [(*row[:2], *cell) for row in rows for cell in zip(names, row[2:], strict=True)]
    print_table(headings, rows)
    for part in slices:
        if notes := notes_of(part) if part.metrics or part.undefined else ():
            say(f"note: {part.name}: {'; '.join(notes)}")


def _value_of(part: Any, name: str) -> str:
    if name in part.metrics:
        return with_interval(part.metrics[name], part.intervals.get(name))
    return UNDEFINED if name in part.undefined else "-"


def _fits(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the terminal is wide enough for a table, whose columns have a border and a space on each side."""
    return sum(width + 3 for width in _widths(headings, rows)) < shutil.get_terminal_size().columns


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_width, column)) for column in zip(headings, *rows, strict=True)]


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _print_rich(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in headings:
        table.add_column(Text(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # literal: a bracket in an error starts no markup
    Console().print(table)


def plain(value: Any) -> Any:
    """Return the value as JSON types: NaN and infinities become strings, as in protobuf's JSON."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value


def failures_note(evaluations: Iterable[Evaluation]) -> str:
    """Return how evaluations that failed on datasets are tried again, of entries in the ledger's order; empty if none.

    The server takes a failure as final, since the same would fail again.
    """
    scorings = (each for each in evaluations if each.dataset and each.outcome in {"scored", "failed"})
    latest = {(each.step, each.dataset): each.outcome for each in scorings}
    failed = sorted(key for key, outcome in latest.items() if outcome == "failed")
    if not failed:
        return ""
    datasets = " ".join(f"--dataset {shlex.quote(name)}" for name in dict.fromkeys(name for _, name in failed))
    return (
        "note: with the cause gone and the server started again, this scores what failed: "
        f"understudy rescore --since {failed[0][0]} {datasets}"
    )


class ComparabilityNotes:
    """Finds changes of datasets and metrics in the entries of a ledger, which come in their order."""

    def __init__(self) -> None:
        self._contents: dict[str, str] = {}
        self._configurations: dict[tuple[str, str], str] = {}

    def of(self, entry: Evaluation) -> Iterator[str]:
        """Yield a sentence for each dataset with other content than before, and each metric configured otherwise."""
        if entry.outcome != "scored":
            return
        content = entry.dataset_digest or self._contents.get(entry.dataset, "")
        if self._contents.get(entry.dataset, content) != content:
            yield _note(entry, f"{entry.dataset} has other examples")
        self._contents[entry.dataset] = content
        for metric, digest in entry.metric_digests.items():
            if self._configurations.get((entry.dataset, metric), digest) != digest:
                yield _note(entry, f"{metric} on {entry.dataset} has another configuration")
            self._configurations[entry.dataset, metric] = digest


def _note(entry: Evaluation, change: str) -> str:
    return f"from #{entry.sequence} (step {entry.step}) on, {change}; do not compare across that entry"
