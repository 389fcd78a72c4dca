"""``understudy evaluate``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.command_errors import reported
from understudy.cli.connection import ConnectionSettings, connected, json_option, metadata_of, version_option
from understudy.cli.options import settings_options
from understudy.cli.output import UNDEFINED, notes_of, ordered, print_json, print_slices, print_table, say
from understudy.cli.run_checkpoint import (
    RunCheckpoints,
    checkpoint_options,
    files_for_server,
    pool_maker,
    workers_options,
)
from understudy.cli.scoring_options import (
    batch_size_option,
    counted_batches,
    metric_option,
    progress_bar,
    resampling_options,
    slice_min_examples_option,
    slice_option,
)
from understudy.cli.values import LocalPath, LocalPathOrUrl

if TYPE_CHECKING:
    from understudy.clients import Client, EvaluateResult, Evaluation, Metric, Progress, Version
    from understudy.evaluator.sharding.evaluate import MakePool
    from understudy.evaluator.types import EvaluationResult


@click.command("evaluate")
@click.argument("files", type=LocalPathOrUrl(exists=True, path_type=Path), nargs=-1)
@version_option("The version to score; loaded on demand. By default the serving version, with --run-dir the best.")
@metric_option
@slice_option
@slice_min_examples_option
@resampling_options(
    least=0,
    default=0,
    resamples="How many times to resample the examples for the intervals; 0 for no intervals.",
    confidence="The confidence level of the intervals.",
)
@batch_size_option
@click.option(
    "--dataset", metavar="NAME", help="Score on this dataset of the server, which records it, instead of FILES."
)
@click.option(
    "--step", "steps", metavar="N,M,...", help="The steps to score on --dataset; the serving version by default."
)
@click.option(
    "--progress-file",
    type=LocalPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --run-dir, keep the progress in this file; the same command goes on from it if it was interrupted.",
)
@json_option("Print one JSON object per result.")
@workers_options
@checkpoint_options
@settings_options(settings=ConnectionSettings)
def command(
    *,
    files: tuple[Path | str, ...],
    version: Version | None,
    metrics: tuple[Metric, ...],
    batch_size: int,
    dataset: str | None,
    steps: str | None,
    progress_file: Path | None,
    as_json: bool,
    workers: int | None,
    cluster: str | None,
    run: RunCheckpoints,
    settings: ConnectionSettings,
    **parts: Any,
) -> None:
    """Score a version on the examples of FILES, or on a dataset of the server.

    For a server, there is one .npz file with every input, and the targets of the outputs that have a loss or metric,
    under the names of the model's inputs and outputs (a single input may also be called x, a single target y), and
    optionally sample_weight, a weight for each example, and the features that --slice names. A dataset is scored with
    the slices and intervals that the server is set to.

    With --run-dir, no server is needed: the checkpoint is read from the run, and --workers processes compute its
    outputs. FILES are then .npz files, TFRecord files or folders of them, or their URLs (s3://..., gs://...), or one
    saved tf.data folder. With --progress-file, a command that was interrupted goes on where it ended.
    """
    if bool(files) == (dataset is not None):
        raise click.UsageError(f"Got {'both FILES and' if files else 'neither FILES nor'} --dataset; give one of them.")
    if run.is_given:
        if dataset is not None:
            raise click.UsageError(
                "--dataset is of a server, and goes without --run-dir and --checkpoints; give FILES."
            )
        is_alone = workers in {None, 1} and cluster is None
        make_pool = None if is_alone else pool_maker(workers, cluster)
        result = _score_locally(
            run, files, batch_size, make_pool, progress_file, version=version, metrics=metrics, **parts
        )
        _show(result, as_json=as_json)
        return
    sent = files_for_server(files, workers, cluster)
    if progress_file is not None:
        raise click.UsageError("--progress-file goes with --run-dir.")
    if steps is not None and (dataset is None or version is not None):
        raise click.UsageError("--step goes with --dataset, and instead of --version.")
    if metrics and dataset is not None:
        raise click.UsageError("--metric goes with FILES; a dataset is scored with the compiled metrics.")
    if dataset is not None and (parts["slices"] or parts["resamples"]):
        raise click.UsageError("--slice and --resamples go with FILES; for a dataset they are settings of the server.")
    with connected(settings) as client:
        if sent:
            result = _score_file(client, sent[0], batch_size, version=version, metrics=metrics, **parts)
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

    examples = examples_to_score(file, metadata_of(client, options["version"]), options["slices"])
    with progress_bar(f"scoring {file.name}") as advance:
        return client.evaluate(counted_batches(examples, batch_size, advance), **options)


def _score_locally(
    run: RunCheckpoints,
    files: tuple[Path | str, ...],
    batch_size: int,
    make_pool: MakePool | None,
    progress_file: Path | None,
    **options: Any,
) -> EvaluateResult:
    """Score a checkpoint of a run in this process, or in those of a pool."""
    from understudy.checkpoints.checkpoint_errors import CheckpointError
    from understudy.evaluator.evaluation.breakdown import BreakdownOptions
    from understudy.evaluator.evaluation.slices import parse_slices
    from understudy.evaluator.evaluator_errors import EvaluatorError
    from understudy.evaluator.sharding.evaluate import evaluate_files
    from understudy.evaluator.sharding.progress_file import ProgressFile
    from understudy.evaluator.sharding.work import DataSource, Work
    from understudy.evaluator.types import MetricSpec
    from understudy.experiments import ExperimentError

    with ExitStack() as stack:
        stack.enter_context(reported(EvaluatorError, ExperimentError, CheckpointError))
        step, model = stack.enter_context(run.opened(options["version"]))
        advance = stack.enter_context(progress_bar(f"scoring step {step}"))
        found = evaluate_files(
            Work(model=model, data=DataSource(name="files", paths=files), batch_size=batch_size),
            step=step,
            metrics=tuple(MetricSpec(name=metric.name, config=metric.config) for metric in options["metrics"]),
            breakdown=BreakdownOptions(
                slices=parse_slices(options["slices"]),
                slice_min_examples=options["slice_min_examples"],
                resamples=options["resamples"],
                confidence=options["confidence"],
            ),
            make_pool=make_pool,
            progress=advance,
            progress_file=None if progress_file is None else ProgressFile(progress_file),
        )
    return _as_result(found)


def _as_result(found: EvaluationResult) -> EvaluateResult:
    """Return the evaluator's score as the clients return it."""
    from understudy.clients import EvaluateResult, Interval, SliceScore

    def shown(intervals: Mapping[str, Any]) -> dict[str, Interval]:
        return {name: Interval(low=each.low, high=each.high) for name, each in intervals.items()}

    return EvaluateResult(
        metrics=found.metrics,
        examples=found.examples,
        batches=found.batches,
        step=found.step,
        waiting_seconds=found.waiting_seconds,
        computing_seconds=found.computing_seconds,
        notes=found.notes,
        intervals=shown(found.intervals),
        slices=tuple(
            SliceScore(
                name=part.name,
                examples=part.examples,
                metrics=part.metrics,
                intervals=shown(part.intervals),
                notes=part.notes,
                undefined=part.undefined,
            )
            for part in found.slices
        ),
        resamples=found.resamples,
        confidence=found.confidence,
        undefined=found.undefined,
    )


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
    rows = [
        (name, f"{result.metrics[name]:.9g}" if name in result.metrics else UNDEFINED, _bounds(result, name))
        for name in ordered((*result.metrics, *result.undefined))
    ]
    title = f"step {result.step}, {result.examples} examples"
    if result.intervals:
        print_table(("metric", "value", f"{result.confidence:.0%} interval"), rows, title=title)
    else:
        print_table(("metric", "value"), [row[:2] for row in rows], title=title)
    print_slices(result.slices)
    for note in notes_of(result):
        say(f"note: {note}")


def _bounds(result: EvaluateResult | Evaluation, name: str) -> str:
    found = result.intervals.get(name)
    return "-" if found is None else f"[{found.low:.6g}, {found.high:.6g}]"
