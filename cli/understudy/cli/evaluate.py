"""``understudy evaluate``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.connection import ConnectionSettings, connected, json_option, version_option
from understudy.cli.options import settings_options
from understudy.cli.output import ordered, print_json, print_slices, print_table
from understudy.cli.scoring_options import (
    batch_size_option,
    counted_batches,
    metric_option,
    progress_bar,
    slice_min_examples_option,
    slice_option,
)

if TYPE_CHECKING:
    from understudy.clients import Client, EvaluateResult, Evaluation, Metric, Progress, Version


@click.command("evaluate")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@version_option("The version to score; loaded on demand. The serving version by default.")
@metric_option
@slice_option
@slice_min_examples_option
@click.option(
    "--resamples",
    type=click.IntRange(0, 10_000),
    default=0,
    show_default=True,
    metavar="N",
    help="How many times to resample the examples for the intervals; 0 for no intervals.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    metavar="SHARE",
    help="The confidence level of the intervals.",
)
@batch_size_option
@click.option(
    "--dataset", metavar="NAME", help="Score on this dataset of the server, which records it, instead of FILE."
)
@click.option(
    "--step", "steps", metavar="N,M,...", help="The steps to score on --dataset; the serving version by default."
)
@json_option("Print one JSON object per result.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    file: Path | None,
    version: Version | None,
    metrics: tuple[Metric, ...],
    batch_size: int,
    dataset: str | None,
    steps: str | None,
    as_json: bool,
    settings: ConnectionSettings,
    **parts: Any,
) -> None:
    """Score a version on the examples of FILE, or on a dataset of the server.

    FILE is an .npz file with every input and every target under the names of the model's inputs and outputs (a single
    input may also be called x, a single target y), and optionally sample_weight, a weight for each example, and the
    features that --slice names. A dataset is scored with the slices and intervals that the server is set to.
    """
    if (file is None) == (dataset is None):
        raise click.UsageError(f"Got {'neither' if file is None else 'both'} FILE and --dataset; give one of them.")
    if steps is not None and (dataset is None or version is not None):
        raise click.UsageError("--step goes with --dataset, and instead of --version.")
    if metrics and dataset is not None:
        raise click.UsageError("--metric goes with FILE; a dataset is scored with the compiled metrics.")
    if dataset is not None and (parts["slices"] or parts["resamples"]):
        raise click.UsageError("--slice and --resamples go with FILE; for a dataset they are settings of the server.")
    with connected(settings) as client:
        if file is not None:
            result = _score_file(client, file, batch_size, version=version, metrics=metrics, **parts)
            _show(result, as_json=as_json)
            return
        for chosen in [version] if steps is None else _parsed(steps):
            _show(_score_dataset(client, str(dataset), chosen), as_json=as_json)


def _parsed(steps: str) -> list[int]:
    try:
        return [int(step) for step in steps.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected steps separated by commas, got {steps!r}", param_hint="'--step'") from None


def _score_file(client: Client, file: Path, batch_size: int, **options: Any) -> EvaluateResult:
    from understudy.cli.arrays import examples_to_score

    examples = examples_to_score(file, client.metadata(), options["slices"])
    with progress_bar(f"scoring {file.name}") as advance:
        return client.evaluate(counted_batches(examples, batch_size, advance), **options)


def _score_dataset(client: Client, dataset: str, version: Version | None) -> Evaluation:
    with progress_bar(f"scoring {dataset}") as advance:

        def report(progress: Progress) -> None:
            advance(progress.examples, progress.total_examples)

        return client.evaluate_dataset(dataset, version=version, on_progress=report)


def _show(result: EvaluateResult | Evaluation, *, as_json: bool) -> None:
    if as_json:
        recorded = getattr(result, "recorded_at", None)
        print_json(
            {**dataclasses.asdict(result), **({} if recorded is None else {"recorded_at": recorded.isoformat()})}
        )
        return
    rows = [(name, f"{result.metrics[name]:.9g}", _bounds(result, name)) for name in ordered(result.metrics)]
    title = f"step {result.step}, {result.examples} examples"
    if result.intervals:
        print_table(("metric", "value", f"{result.confidence:.0%} interval"), rows, title=title)
    else:
        print_table(("metric", "value"), [row[:2] for row in rows], title=title)
    print_slices(result.slices)
    for note in result.notes:
        click.echo(f"note: {note}")


def _bounds(result: EvaluateResult | Evaluation, name: str) -> str:
    found = result.intervals.get(name)
    return "-" if found is None else f"[{found.low:.6g}, {found.high:.6g}]"
