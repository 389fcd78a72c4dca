"""``understudy compare``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.connection import ConnectionSettings, VersionsType, connected, json_option, metadata_of
from understudy.cli.options import settings_options
from understudy.cli.output import UNDEFINED, notes_of, ordered, print_json, print_table, say
from understudy.cli.scoring_options import (
    batch_size_option,
    counted_batches,
    metric_option,
    progress_bar,
    resampling_options,
    slice_min_examples_option,
    slice_option,
)
from understudy.cli.values import LocalPath

if TYPE_CHECKING:
    from understudy.clients import Client, CompareResult, LossDifference, Metric, MetricDifference, Version


@click.command("compare")
@click.argument("file", type=LocalPath(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option(
    "--versions",
    type=VersionsType(),
    required=True,
    metavar="VERSION,VERSION,...",
    help="Steps or labels (serving, latest, best); the others are compared with the first.",
)
@click.option("--dataset", metavar="NAME", help="Compare on this dataset of the server, instead of FILE.")
@metric_option
@slice_option
@slice_min_examples_option
@batch_size_option
@resampling_options(
    least=1,
    default=1000,
    resamples="How many times to resample the examples for the intervals.",
    confidence="The share of the resampled differences within an interval.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of the resampling."
)
@json_option("Print one JSON object with every version's score, differences and interval.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    file: Path | None,
    versions: tuple[Version, ...],
    dataset: str | None,
    metrics: tuple[Metric, ...],
    batch_size: int,
    as_json: bool,
    settings: ConnectionSettings,
    slices: tuple[str, ...],
    **bootstrap: Any,
) -> None:
    """Score versions on the same examples, from FILE or a dataset of the server, and say which is better.

    FILE is an .npz file as for `understudy evaluate`. A version is better or worse than the first if the interval of
    the difference of their mean losses, from a paired bootstrap over the examples, excludes 0.
    """
    if (file is None) == (dataset is None):
        raise click.UsageError(f"Got {'neither' if file is None else 'both'} FILE and --dataset; give one of them.")
    with connected(settings) as client:
        if file is None:
            result = client.compare(versions=versions, dataset=dataset, metrics=metrics, slices=slices, **bootstrap)
        else:
            options = {"metrics": metrics, "slices": slices, **bootstrap}
            result = _compare_file(client, file, versions, batch_size=batch_size, **options)
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        print_comparison(result)


def _compare_file(
    client: Client, file: Path, versions: tuple[Version, ...], *, batch_size: int, **options: Any
) -> CompareResult:
    from understudy.cli.arrays import examples_to_score

    examples = examples_to_score(file, metadata_of(client, *versions), options["slices"])
    with progress_bar(f"comparing on {file.name}") as advance:
        batches = counted_batches(examples, batch_size, advance)
        return client.compare(batches, versions=versions, **options)


def print_comparison(result: CompareResult) -> None:
    """Print the score of each version, its differences from the first one's, and what they allow to conclude."""
    first = result.versions[0].score
    title = f"{first.examples} examples, compared with step {first.step}"
    bounds = f"{result.confidence:.0%} interval"
    rows = list(_metric_rows(result))
    if any(version.metric_differences for version in result.versions):
        print_table(("step", "metric", "value", "difference", bounds, "p"), rows, title=title)
    else:
        print_table(("step", "metric", "value", "difference"), [row[:4] for row in rows], title=title)
    if slices := list(_slice_rows(result)):
        print_table(("step", "slice", "examples", "metric", "difference", bounds, "p"), slices)
    for version in result.versions[1:]:
        if version.loss_difference is not None:
            say(_conclusion(version.score.step, first.step, version.loss_difference, result.confidence))
    of_versions = (note for version in result.versions for note in notes_of(version.score))
    for note in dict.fromkeys((*result.notes, *of_versions)):
        say(f"note: {note}")


def _metric_rows(result: CompareResult) -> Iterator[tuple[str, ...]]:
    """Yield a row for each metric of each version."""
    first = result.versions[0].score
    for version in result.versions:
        score = version.score
        for name in ordered((*first.metrics, *first.undefined)):
            missing = UNDEFINED if name in score.undefined else "-"
            value = f"{score.metrics[name]:.9g}" if name in score.metrics else missing
            difference = version.differences.get(name, math.nan)
            shown = "-" if math.isnan(difference) else f"{difference:+.6g}"
            yield str(score.step), name, value, shown, *_bounds(version.metric_differences.get(name))


def _slice_rows(result: CompareResult) -> Iterator[tuple[str, ...]]:
    """Yield a row for each metric of each slice of each version that has a difference."""
    for version in result.versions:
        for part in version.slice_differences:
            for name in ordered(part.differences):
                difference = part.differences[name]
                shown = f"{difference.value:+.6g}"
                yield str(version.score.step), part.name, str(part.examples), name, shown, *_bounds(difference)


def _bounds(difference: MetricDifference | None) -> tuple[str, str]:
    """Return the interval and the p-value of a difference."""
    return (
        ("", "")
        if difference is None
        else (f"[{difference.low:+.4g}, {difference.high:+.4g}]", f"{difference.p_value:.2g}")
    )


def _conclusion(step: int, first: int, paired: LossDifference, confidence: float) -> str:
    if math.isnan(paired.mean):
        return f"the losses of step {step} and step {first} cannot be compared: those of some examples are not finite"
    return (
        f"step {step} is {_CONCLUSIONS[paired.conclusion]} step {first}: loss of an example {paired.mean:+.6g}, "
        f"{confidence:.0%} interval [{paired.low:+.6g}, {paired.high:+.6g}]"
    )


_CONCLUSIONS = {"better": "better than", "worse": "worse than", "undecided": "indistinguishable from"}
