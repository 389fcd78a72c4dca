"""``understudy status``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from understudy.cli.connection import ConnectionSettings, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import evaluation_as_json, failures_note, formatted_metrics, print_json, print_table, say

DECISIONS = ("accepted", "refused", "undecided")

if TYPE_CHECKING:
    from understudy.clients import Evaluation, FleetServer, ModelStatus, Rollout, VersionStatus


@click.command("status")
@json_option("Print one JSON object: the status, and the latest evaluation of each version on each dataset.")
@click.option(
    "--fleet",
    is_flag=True,
    help="Show instead which servers follow this evaluator, what each serves, since when, how long it took, and why it "
    "does not serve what was decided last. Exits with 1 if one of them does not, or has left.",
)
@settings_options(settings=ConnectionSettings)
def command(
    *,
    as_json: bool,
    fleet: bool,
    settings: ConnectionSettings,
) -> None:
    """Show the versions of a server and their latest evaluations.

    Exits with 1 if none is serving yet.
    """
    if fleet:
        _show_fleet(settings, as_json=as_json)
        return
    with connected(settings) as client:
        status = client.status()
        steps = [version.step for version in status.versions]
        evaluations = (
            latest_evaluations(list(client.list_evaluations(min_step=min(steps), max_step=max(steps)))) if steps else []
        )
    if as_json:
        print_json({**dataclasses.asdict(status), "evaluations": [evaluation_as_json(each) for each in evaluations]})
    else:
        _print(status, evaluations)
    if status.serving_step is None:
        raise click.exceptions.Exit(1)


def _show_fleet(settings: ConnectionSettings, *, as_json: bool) -> None:
    with connected(settings) as client:
        found = client.fleet()
    if as_json:
        print_json(dataclasses.asdict(found))
    elif not found.servers and found.rollout is None:
        say("no server follows this evaluator")
    else:
        decided = "nothing yet" if found.decision is None else f"step {found.decision.step}"
        if found.rollout is not None:
            decided += f"; {_rollout_in_words(found.rollout)}"
        rows = [_fleet_row(server) for server in found.servers]
        print_table(
            ("server", "version", "state", "for", "lag", "software", "reason"), rows, title=f"decided: {decided}"
        )
    if not all(server.current for server in found.servers):
        raise click.exceptions.Exit(1)


def _rollout_in_words(rollout: Rollout) -> str:
    spent, shadow = f"{rollout.elapsed_seconds:.0f} s of {rollout.after_seconds:.0f} s", rollout.shadow
    if shadow is None:
        return f"rolling out step {rollout.step} on {', '.join(rollout.servers)} ({spent})"
    compared = f"{shadow.compared} of {rollout.least_requests} requests compared"
    differ = f", {shadow.disagreeing / shadow.compared:.2%} differ" if shadow.compared else ""
    failed = f", {shadow.errors + shadow.not_finite} failed" if shadow.errors + shadow.not_finite else ""
    return f"comparing step {rollout.step} ({spent}; {compared}{differ}{failed})"


def _fleet_row(server: FleetServer) -> tuple[str, ...]:
    state = "current" if server.current else "behind" if server.connected else "left"
    return (
        server.name,
        "-" if server.serving_step is None else str(server.serving_step),
        state,
        _seconds(server.serving_seconds),
        _seconds(server.lag_seconds),
        server.software_version,
        server.reason,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def latest_evaluations(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Return the last entry of each step on each dataset, and the gate's last decision, in the ledger's order.

    That a checkpoint could not be loaded no longer counts once it was scored.
    """
    last = {(each.step, each.dataset, each.outcome in DECISIONS): each for each in evaluations}.values()
    scored = {each.step: each.sequence for each in last if each.outcome == "scored"}
    return [
        each
        for each in last
        if each.dataset or each.outcome != "failed" or each.sequence > scored.get(each.step, each.sequence - 1)
    ]


def _print(status: ModelStatus, evaluations: list[Evaluation]) -> None:
    if status.problem:
        say(f"new checkpoints may be missing: {status.problem}")
    if not status.versions:
        say(f"{status.model_name}: no version yet")
        return
    rows = [
        (
            str(version.step),
            version.state,
            " ".join(roles(version, status)),
            version.error or scores(version.step, evaluations),
        )
        for version in status.versions
    ]
    print_table(("step", "state", "role", "evaluations"), rows, title=status.model_name)
    if note := failures_note(evaluations):
        say(note)


def roles(version: VersionStatus, status: ModelStatus) -> list[str]:
    """Return what a version is: serving, latest, best, pinned."""
    steps = {"latest": status.latest_step, "best": status.best_step, "pinned": status.pinned_step}
    return [*(["serving"] if version.serving else []), *(role for role, step in steps.items() if step == version.step)]


def scores(step: int, evaluations: Iterable[Evaluation]) -> str:
    """Return the scores of a step in one line, or why it has none."""
    return "; ".join(_in_words(each) for each in evaluations if each.step == step)


def _in_words(evaluation: Evaluation) -> str:
    if evaluation.outcome == "scored":
        return f"{evaluation.dataset}: {formatted_metrics(evaluation)}"
    said = f"{evaluation.outcome}: {evaluation.reason}"
    return said if evaluation.outcome in DECISIONS or not evaluation.dataset else f"{evaluation.dataset}: {said}"
