"""``understudy evaluations``."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import click

from understudy.cli.connection import ConnectionSettings, connected
from understudy.cli.options import settings_options
from understudy.cli.output import (
    UNDEFINED,
    ComparabilityNotes,
    counted,
    csv_cell,
    evaluation_as_json,
    failures_note,
    formatted_metrics,
    formatted_slice,
    notes_of,
    plain,
    print_table,
    say,
)

if TYPE_CHECKING:
    from understudy.clients import Evaluation
    from understudy.clients.evaluation_types import EvaluationOutcome

Format = Literal["table", "csv", "json"]

_IN_COLUMNS = frozenset({"metrics", "intervals", "slices", "conditions", "metric_digests", "undefined"})
"""The fields that CSV has in columns or rows of their own, or lacks."""

_OUTCOMES = (
    *("scored", "skipped", "failed", "accepted", "refused", "undecided"),
    *("rollout_started", "rollout_promoted", "rollout_rolled_back", "rollout_stopped"),
)


@click.command("evaluations")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="A table for people; CSV with one column per metric; or a JSON array, one entry per line.",
)
@click.option("--dataset", metavar="NAME", help="Only entries of this dataset.")
@click.option("--min-step", type=click.IntRange(0), metavar="STEP", help="Only entries of steps from this one on.")
@click.option("--max-step", type=click.IntRange(0), metavar="STEP", help="Only entries of steps up to this one.")
@click.option("--outcome", type=click.Choice(_OUTCOMES), help="Only entries with this outcome.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    form: Format,
    dataset: str | None,
    min_step: int | None,
    max_step: int | None,
    outcome: str | None,
    settings: ConnectionSettings,
) -> None:
    """Show or export a server's record of every checkpoint, oldest entry first.

    \b
    understudy evaluations --dataset test
    understudy evaluations --format csv --outcome scored > scores.csv
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    with connected(settings) as client:
        evaluations = list(
            client.list_evaluations(
                dataset=dataset,
                min_step=min_step,
                max_step=max_step,
                outcome=cast("EvaluationOutcome | None", outcome),
            )
        )
    {"table": _print_table, "csv": _print_csv, "json": _print_json}[form](evaluations)


def _print_table(evaluations: Sequence[Evaluation]) -> None:
    rows: list[tuple[str, ...]] = []
    for each in evaluations:
        shown = formatted_metrics(each, with_intervals=True) if each.outcome == "scored" else each.reason
        recorded = f"{each.recorded_at.astimezone():%Y-%m-%d %H:%M:%S}"
        rows.append((str(each.sequence), str(each.step), each.dataset, each.outcome, recorded, shown))
        for part in each.slices:
            shown = formatted_slice(part)
            rows.append(("", "", f"  {part.name}", counted(part.examples), "", shown))
    print_table(("#", "step", "dataset", "outcome", "recorded", "metrics or reason"), rows)
    comparability = ComparabilityNotes()
    datasets: dict[str, dict[str, None]] = {}
    for each in evaluations:
        for note in notes_of(each):
            datasets.setdefault(note, {})[each.dataset] = None
    said = (f"{', '.join(names)}: {note}" for note, names in datasets.items())
    for note in (*said, *(note for each in evaluations for note in comparability.of(each))):
        say(f"note: {note}")
    if told := failures_note(evaluations):
        say(told)


def _print_csv(evaluations: Sequence[Evaluation]) -> None:
    """Write one row for each entry, and one for each of its slices, with numbers in Python's notation.

    After the fields come the columns ``metric.NAME``, ``undefined`` if the metric is, for a reason in ``notes``, and
    those of the intervals, ``low.NAME`` and ``high.NAME``.
    """
    metrics = sorted({name for each in evaluations for name in (*each.metrics, *each.undefined)})
    bounded = sorted({name for each in evaluations for name in each.intervals})
    fields = [field.name for field in dataclasses.fields(_evaluation_type()) if field.name not in _IN_COLUMNS]
    bounds = [f"{bound}.{name}" for name in bounded for bound in ("low", "high")]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(csv_cell, [*fields, "slice", *(f"metric.{name}" for name in metrics), *bounds]))
    for each in evaluations:
        row = evaluation_as_json(each)
        for scored, part in zip((each, *each.slices), ({**row, "name": ""}, *row["slices"]), strict=True):
            own = {**row, "examples": part["examples"], "notes": " | ".join(notes_of(scored))}
            values = [part["metrics"].get(name, UNDEFINED if name in part["undefined"] else "") for name in metrics]
            edges = [part["intervals"].get(name, {}).get(bound, "") for name in bounded for bound in ("low", "high")]
            writer.writerow(map(csv_cell, [*(own[field] for field in fields), part["name"], *values, *edges]))


def _print_json(evaluations: Sequence[Evaluation]) -> None:
    """Write an array that is valid JSON as a whole, with one entry per line."""
    lines = (json.dumps(plain(evaluation_as_json(each)), allow_nan=False) for each in evaluations)
    click.echo("[" + ",\n".join(lines) + "]")


def _evaluation_type() -> type[Evaluation]:
    from understudy.clients import Evaluation

    return Evaluation
