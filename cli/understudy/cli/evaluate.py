"""``understudy evaluate``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.connection import ConnectionSettings, connected, json_option, version_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.clients import Client, EvaluateResult, Metric, Progress, Version


class _MetricType(click.ParamType["Metric"]):
    name = "metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Metric:
        from understudy.clients import Metric

        name, equals, text = str(value).partition("=")
        try:
            config = json.loads(text) if equals else {}
        except json.JSONDecodeError as error:
            return self.fail(f"what follows {name}= is not JSON: {error}", param, ctx)
        if not isinstance(config, dict):
            return self.fail(f"what follows {name}= is not a JSON object: {text}", param, ctx)
        return Metric(name=name, config=config)


@click.command("evaluate")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@version_option("The version to score; loaded for the purpose if need be. The one on stage by default.")
@click.option(
    "--metric",
    "metrics",
    type=_MetricType(),
    multiple=True,
    metavar="NAME[=JSON]",
    help='A Keras metric with its configuration, such as AUC={"curve":"PR"}; repeatable. The compiled ones by default.',
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=256, show_default=True, metavar="N", help="Rows to score at once."
)
@click.option(
    "--dataset", metavar="NAME", help="Score on this dataset of the server, which records it, instead of FILE."
)
@click.option(
    "--step", "steps", metavar="N,M,...", help="The steps to score on --dataset; the version on stage by default."
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
    """Score a version on the rows of FILE, or on a dataset the server has.

    FILE is an .npz file with every input and every target under the names of the model's inputs and outputs (a lone
    input may also be called x, a lone target y), and optionally sample_weight, a weight for each row.
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
    from understudy.cli.arrays import rows_to_score

    rows = rows_to_score(file, client.metadata())
    with _progress(f"scoring {file.name}") as advance:

        def counted() -> Iterator[tuple[Any, ...]]:
            for index, batch in enumerate(rows.batches_of(batch_size)):
                advance(index * batch_size, rows.count)
                yield batch

        return client.evaluate(counted(), version=version, metrics=metrics)


def _score_dataset(client: Client, dataset: str, version: Version | None) -> dict[str, Any]:
    with _progress(f"scoring {dataset}") as advance:

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


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on stderr where that is a terminal; the function given sets how far it has come."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
