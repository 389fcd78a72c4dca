"""``understudy report``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.command_errors import written
from understudy.cli.connection import ConnectionSettings, VersionsType, VersionType, connected
from understudy.cli.options import settings_options
from understudy.cli.output import evaluation_as_json, plain
from understudy.cli.report_page import read_drift
from understudy.cli.values import LocalPath

if TYPE_CHECKING:
    from understudy.cli.report_page import Changes, Report
    from understudy.clients import Client, Evaluation, ExampleList, Version

_SUFFIXES = (".html", ".json")


def _output_file(_: click.Context, __: click.Parameter, value: Path) -> Path:
    if value.suffix not in _SUFFIXES:
        raise click.BadParameter(f"{str(value)!r} ends in neither {' nor '.join(_SUFFIXES)}.")
    return value


@click.command("report")
@click.option("--step", type=VersionType(), help="The version to report on; the serving one by default.")
@click.option(
    "--compare",
    type=VersionsType(2),
    metavar="VERSION,VERSION",
    help="Two versions to show beside each other: a baseline, then the one that is compared with it.",
)
@click.option("--dataset", metavar="NAME", help="The dataset; the server's first one by default.")
@click.option(
    "--output",
    type=LocalPath(dir_okay=False, path_type=Path),
    required=True,
    callback=_output_file,
    metavar="FILE",
    help="Where to write: a page, which ends in .html, or its data, which end in .json.",
)
@click.option(
    "--drift",
    type=LocalPath(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Show drift, too: what `understudy drift --json` prints, or drift.json of the server's state folder.",
)
@settings_options(settings=ConnectionSettings)
def command(
    *,
    step: Version | None,
    compare: tuple[Version, ...] | None,
    dataset: str | None,
    drift: Path | None,
    output: Path,
    settings: ConnectionSettings,
) -> None:
    """Write a report: metrics, confusions, curves, reliability, residuals, hard and changed examples.

    The server records what it shows with `understudy serve --tables`. A single version is compared with the serving
    one. The page is one file that needs no network.
    """
    if step is not None and compare is not None:
        raise click.UsageError("Got both --step and --compare; give one of them.")
    found = None if drift is None else read_drift(drift)
    with connected(settings) as client:
        report = dataclasses.replace(_collected(client, compare or (step,), dataset), drift=found)
    with written(output):
        output.write_text(_rendered(report, output.suffix), encoding="utf-8")
    click.echo(f"wrote {output}: {' and '.join(f'step {one.evaluation.step}' for one in report.versions)}")


def _collected(client: Client, versions: tuple[Version | None, ...], dataset: str | None) -> Report:
    from understudy.cli.report_page import Report, ReportedVersion

    tables = [client.evaluation_tables(dataset, version=version) for version in versions]
    last = tables[-1].evaluation
    baseline = tables[0].evaluation.step if len(tables) > 1 else None
    return Report(
        model_name=client.status().model_name,
        versions=[ReportedVersion(evaluation=one.evaluation, content=one.content) for one in tables],
        changes=_changes(client, last.dataset, version=last.step, baseline=baseline),
        notes=() if baseline is None else _scored_alone(client, *(one.evaluation for one in tables)),
    )


def _scored_alone(client: Client, first: Evaluation, second: Evaluation) -> tuple[str, ...]:
    """Return a sentence about each dataset that only one of two versions has a score on."""
    scored = [_scored_on(client, of) for of in (first, second)]
    return tuple(
        f"{dataset} is left out: step {having.step} has a score on it, and step {lacking.step} has none"
        for having, lacking, datasets in (
            (first, second, scored[0] - scored[1]),
            (second, first, scored[1] - scored[0]),
        )
        for dataset in sorted(datasets)
    )


def _scored_on(client: Client, version: Evaluation) -> set[str]:
    entries = client.list_evaluations(min_step=version.step, max_step=version.step, outcome="scored")
    return {entry.dataset for entry in entries if entry.checkpoint_digest == version.checkpoint_digest}


def _changes(client: Client, dataset: str, *, version: int, baseline: int | None) -> Changes:
    """Return what changed from a version, or from the serving one; or why that is not known."""
    from understudy.cli.report_page import Changes
    from understudy.clients import FailedPreconditionError, InvalidArgumentError, NotFoundError

    if baseline is None and client.status().serving_step is None:
        return Changes(reason="No version is serving yet, so there is none to compare with.")
    try:
        return Changes(
            newly_wrong=client.examples("newly_wrong", dataset, version=version, baseline=baseline),
            newly_right=client.examples("newly_right", dataset, version=version, baseline=baseline),
        )
    except (FailedPreconditionError, InvalidArgumentError, NotFoundError) as error:
        return Changes(reason=str(error))


def _rendered(report: Report, suffix: str) -> str:
    from understudy.cli.report_page import page

    if suffix == ".html":
        return page(report)
    return json.dumps(plain(_as_json(report)), allow_nan=False) + "\n"


def _places(found: ExampleList | None) -> list[int]:
    return [] if found is None else list(found.indices)


def _described(found: ExampleList | None) -> list[dict[str, Any]]:
    """Return what is known about examples: their keys and features, and what was predicted."""
    pairs = [] if found is None else zip(found.indices, found.described, strict=True)
    return [{"index": index, **described} for index, described in pairs]


def _as_json(report: Report) -> dict[str, Any]:
    changed = report.changes
    flips = None if changed.newly_wrong is None else changed.newly_wrong.flips
    return {
        "model_name": report.model_name,
        "versions": [
            {
                "evaluation": evaluation_as_json(one.evaluation),
                "tables": dict(one.content),
            }
            for one in report.versions
        ],
        "changes": {
            "flips": None if flips is None else dataclasses.asdict(flips),
            "newly_wrong": _places(changed.newly_wrong),
            "newly_right": _places(changed.newly_right),
            "described": {
                "newly_wrong": _described(changed.newly_wrong),
                "newly_right": _described(changed.newly_right),
            },
            "reason": changed.reason,
        },
        "notes": list(report.notes),
        **({} if report.drift is None else {"drift": report.drift}),
    }
