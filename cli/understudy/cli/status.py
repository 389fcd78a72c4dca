"""``understudy status``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from understudy.cli.connection import ConnectionSettings, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import formatted_metrics, print_json, print_table

_DECISIONS = ("accepted", "refused", "undecided")

if TYPE_CHECKING:
    from understudy.clients import Evaluation, ModelStatus, VersionStatus


@click.command("status")
@json_option("Print one JSON object: the status, and the latest evaluation of each version on each dataset.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    as_json: bool,
    settings: ConnectionSettings,
) -> None:
    """Show the versions of a server and their latest evaluations.

    Exits with 1 if none is serving yet.
    """
    with connected(settings) as client:
        status = client.status()
        steps = [version.step for version in status.versions]
        evaluations = _latest(list(client.list_evaluations(min_step=min(steps), max_step=max(steps)))) if steps else []
    if as_json:
        print_json({**dataclasses.asdict(status), "evaluations": [_as_json(each) for each in evaluations]})
    else:
        _print(status, evaluations)
    if status.serving_step is None:
        raise click.exceptions.Exit(1)


def _latest(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Return the last entry of each step on each dataset, and the gate's last decision, in the ledger's order."""
    return list({(each.step, each.dataset, each.outcome in _DECISIONS): each for each in evaluations}.values())


def _as_json(evaluation: Evaluation) -> dict[str, object]:
    return {**dataclasses.asdict(evaluation), "recorded_at": evaluation.recorded_at.isoformat()}


def _print(status: ModelStatus, evaluations: list[Evaluation]) -> None:
    if not status.versions:
        click.echo(f"{status.model_name}: no version yet")
        return
    rows = [
        (
            str(version.step),
            version.state,
            " ".join(_roles(version, status)),
            version.error or _scores(version.step, evaluations),
        )
        for version in status.versions
    ]
    print_table(("step", "state", "role", "evaluations"), rows, title=status.model_name)


def _roles(version: VersionStatus, status: ModelStatus) -> list[str]:
    steps = {"latest": status.latest_step, "best": status.best_step, "pinned": status.pinned_step}
    return [*(["serving"] if version.serving else []), *(role for role, step in steps.items() if step == version.step)]


def _scores(step: int, evaluations: list[Evaluation]) -> str:
    return "; ".join(
        f"{each.dataset}: {formatted_metrics(each.metrics)}"
        if each.outcome == "scored"
        else f"{each.outcome}: {each.reason}"
        for each in evaluations
        if each.step == step
    )
