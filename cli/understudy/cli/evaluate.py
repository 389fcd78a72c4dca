"""``understudy evaluate``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.connection import ConnectionSettings, connected, json_option, version_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json, print_table
from understudy.cli.scoring_options import batch_size_option, counted_batches, metric_option, progress_bar

if TYPE_CHECKING:
    from understudy.clients import Client, EvaluateResult, Metric, Progress, Version


@click.command("evaluate")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@version_option("The version to score; loaded on demand. The serving version by default.")
@metric_option
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
) -> None:
    """Score a version on the examples of FILE, or on a dataset of the server.

    FILE is an .npz file with every input and every target under the names of the model's inputs and outputs (a single
    input may also be called x, a single target y), and optionally sample_weight, a weight for each example.
    """
    if (file is None) == (dataset is None):
        raise click.UsageError(f"Got {'neither' if file is None else 'both'} FILE and --dataset; give one of them.")
    if steps is not None and (dataset is None or version is not None):
        raise click.UsageError("--step goes with --dataset, and instead of --version.")
    if metrics and dataset is not None:
        raise click.UsageError("--metric goes with FILE; a dataset is scored with the compiled metrics.")
    with connected(settings) as client:
        if file is not None:
            result = _score_file(client, file, version, metrics, batch_size)
            _show(dataclasses.asdict(result), as_json=as_json)
            return
        for chosen in [version] if steps is None else _parsed(steps):
            _show(_score_dataset(client, str(dataset), chosen), as_json=as_json)


def _parsed(steps: str) -> list[int]:
    try:
        return [int(step) for step in steps.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected steps separated by commas, got {steps!r}", param_hint="'--step'") from None


def _score_file(
    client: Client, file: Path, version: Version | None, metrics: tuple[Metric, ...], batch_size: int
) -> EvaluateResult:
    from understudy.cli.arrays import examples_to_score

    examples = examples_to_score(file, client.metadata())
    with progress_bar(f"scoring {file.name}") as advance:
        return client.evaluate(counted_batches(examples, batch_size, advance), version=version, metrics=metrics)


def _score_dataset(client: Client, dataset: str, version: Version | None) -> dict[str, Any]:
    with progress_bar(f"scoring {dataset}") as advance:

        def report(progress: Progress) -> None:
            advance(progress.examples, progress.total_examples)

        evaluation = client.evaluate_dataset(dataset, version=version, on_progress=report)
    return {**dataclasses.asdict(evaluation), "recorded_at": evaluation.recorded_at.isoformat()}


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    metrics = result["metrics"]
    names = sorted(metrics, key=lambda name: (name != "loss", name))
    title = f"step {result['step']}, {result['examples']} examples"
    print_table(("metric", "value"), [(name, f"{metrics[name]:.9g}") for name in names], title=title)
    for note in result["notes"]:
        click.echo(f"note: {note}")
