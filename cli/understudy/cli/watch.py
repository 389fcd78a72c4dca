"""``understudy watch``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from understudy.cli.command_errors import INTERRUPTED
from understudy.cli.connection import ConnectionSettings, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import (
    ComparabilityNotes,
    counted,
    evaluation_as_json,
    formatted_metrics,
    formatted_slice,
    notes_of,
    print_json,
    say,
)

if TYPE_CHECKING:
    from understudy.clients import Evaluation


@click.command("watch")
@click.option(
    "--after",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="SEQUENCE",
    help="Start after this entry; 0 starts with the first.",
)
@json_option("Print one JSON object per entry.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    after: int,
    as_json: bool,
    settings: ConnectionSettings,
) -> None:
    """Follow evaluations as they are recorded, existing ones first, until interrupted.

    A broken connection resumes after the last entry received.
    """
    comparability = ComparabilityNotes()
    with connected(settings) as client:
        try:
            for evaluation in client.watch_evaluations(after=after):
                if as_json:
                    print_json(evaluation_as_json(evaluation))
                else:
                    _show(evaluation, comparability)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None


def _show(evaluation: Evaluation, comparability: ComparabilityNotes) -> None:
    what = formatted_metrics(evaluation, with_intervals=True) if evaluation.outcome == "scored" else evaluation.reason
    parts = [
        f"{evaluation.recorded_at.astimezone():%H:%M:%S}",
        f"#{evaluation.sequence}",
        f"step {evaluation.step}",
        evaluation.dataset,
        evaluation.outcome,
        what,
    ]
    say("  ".join(part for part in parts if part))
    for part in evaluation.slices:
        scores = formatted_slice(part)
        say(f"    {part.name}  {counted(part.examples)}  {scores}")
    for note in (*notes_of(evaluation), *comparability.of(evaluation)):
        say(f"note: {note}")
