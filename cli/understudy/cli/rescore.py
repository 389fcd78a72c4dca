"""``understudy rescore``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from understudy.cli.connection import ConnectionSettings, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import evaluation_as_json, formatted_metrics, print_json, say
from understudy.cli.scoring_options import progress_bar

if TYPE_CHECKING:
    from understudy.clients import Client, Evaluation, Progress


@click.command("rescore")
@click.option("--since", type=click.IntRange(0), required=True, metavar="STEP", help="The first step to score again.")
@click.option("--until", type=click.IntRange(0), metavar="STEP", help="The last one; the newest by default.")
@click.option(
    "--dataset",
    "datasets",
    multiple=True,
    metavar="NAME",
    help="On this dataset of the server, which may be new; repeatable. By default, on those that each was scored on.",
)
@json_option("Print one JSON object per score.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    since: int,
    until: int | None,
    datasets: tuple[str, ...],
    as_json: bool,
    settings: ConnectionSettings,
) -> None:
    """Score kept checkpoints again after a dataset, a metric, a slice or the number of resamples has changed.

    \b
    understudy rescore --since 1000
    understudy rescore --since 1000 --dataset fresh

    The server must run with the new settings. It loads one checkpoint after another beside the serving version, and
    records each score. What was scored on the same examples in the same way is counted and not scored again, so the
    command can be repeated after it was interrupted.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    with connected(settings) as client:
        entries = list(client.list_evaluations(min_step=since, max_step=until))
        before = [entry for entry in entries if entry.outcome == "scored"]
        steps = [
            each.step for each in client.checkpoints() if since <= each.step and (until is None or each.step <= until)
        ]
        pairs = _pairs(client, before, steps, datasets)
        if not pairs:
            has_failed = any(each.outcome == "failed" and each.step in steps for each in entries)
            failed_too = "name the dataset with --dataset to score those that failed"
            helps = failed_too if has_failed else "see 'understudy evaluations'"
            raise click.ClickException(
                f"the server has no checkpoint from step {since} {'on' if until is None else f'to {until}'} that was "
                f"scored; {helps}"
            )
        counts: Counter[str] = Counter()
        for step, dataset in pairs:
            evaluation = _score(client, step, dataset)
            done = _done(evaluation, before)
            counts[done] += 1
            if as_json:
                print_json(evaluation_as_json(evaluation))
            else:
                say(f"step {step} on {dataset}: {done}: {formatted_metrics(evaluation)}")
        say("; ".join(f"{count} {done}" for done, count in counts.items()), err=True)
        if left_out := "" if datasets else _failed(entries, steps):
            say(left_out, err=True)


def _pairs(
    client: Client, before: Sequence[Evaluation], steps: Sequence[int], datasets: Sequence[str]
) -> list[tuple[int, str]]:
    """Return the steps and datasets to score: those that were scored before, or all steps on the given datasets."""
    known = _known_datasets(client, before)
    scored = {(each.step, each.dataset) for each in before}
    return [(step, dataset) for step in steps for dataset in datasets or known if datasets or (step, dataset) in scored]


def _failed(entries: Sequence[Evaluation], steps: Sequence[int]) -> str:
    """Return which evaluations of steps failed and were never scored, as a sentence; empty if there are none."""
    scored, failed = (
        {(each.step, each.dataset) for each in entries if each.outcome == outcome and each.dataset}
        for outcome in ("scored", "failed")
    )
    pairs = {(step, dataset) for step, dataset in failed - scored if step in steps}
    if not pairs:
        return ""
    step, dataset = min(pairs)
    several = len(pairs) > 1
    return (
        f"{len(pairs)} failed evaluation{'s are' if several else ' is'} left out{', such as' if several else ':'} step "
        f"{step} on {dataset}; name the dataset with --dataset to try again"
    )


def _known_datasets(client: Client, before: Sequence[Evaluation]) -> Sequence[str]:
    """Return the server's datasets; while none of its versions serves, those that were scored."""
    from understudy.clients import UnavailableError

    try:
        return client.metadata().datasets
    except UnavailableError:
        return list(dict.fromkeys(each.dataset for each in before))


def _done(evaluation: Evaluation, before: Sequence[Evaluation]) -> str:
    if not evaluation.sequence:
        return "scored, and not recorded by this read-only server"
    is_new = all(evaluation.sequence != each.sequence for each in before)
    return "scored" if is_new else "already scored in this way"


def _score(client: Client, step: int, dataset: str) -> Evaluation:
    with progress_bar(f"scoring step {step} on {dataset}") as advance:

        def report(progress: Progress) -> None:
            advance(progress.examples, progress.total_examples)

        return client.evaluate_dataset(dataset, version=step, rescore=True, on_progress=report)
