"""``understudy export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.cli.command_errors import CommandError, reported
from understudy.cli.run_checkpoint import RunCheckpoints, checkpoint_options
from understudy.cli.values import LocalPath
from understudy.evaluator.evaluator_errors import EvaluatorError

if TYPE_CHECKING:
    from understudy.evaluator.model.export import ExportFormat

_Step = int | Literal["best", "latest"]
_LABELS = ("best", "latest")


class _StepType(click.ParamType["_Step"]):
    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _Step:
        text = str(value)
        if text in _LABELS:
            return cast("_Step", text)
        if text.isdecimal():
            return int(text)
        return self.fail(f"{text!r} is neither a step nor best or latest.", param, ctx)


@click.command("export")
@checkpoint_options
@click.option(
    "--step",
    type=_StepType(),
    default="best",
    show_default=True,
    metavar="best|latest|STEP",
    help="The checkpoint; best according to the evaluator's --monitor.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["keras", "saved_model"]),
    default="keras",
    show_default=True,
    help="A .keras file (the trainer's unchanged), or a SavedModel for serving systems.",
)
@click.option(
    "--output",
    type=LocalPath(path_type=Path),
    required=True,
    metavar="PATH",
    help="For keras, a path that ends in .keras, or the folder to put model.keras into; for saved_model, the folder "
    "that becomes the SavedModel.",
)
def command(
    *,
    run: RunCheckpoints,
    step: _Step,
    form: ExportFormat,
    output: Path,
) -> None:
    """Export a checkpoint from a run, for use elsewhere.

    \b
    understudy export --run-dir RUN --step best --output best.keras
    understudy export --run-dir RUN --step 400 --format saved_model --output models/digits/400

    No server needs to run. The best checkpoint is there even if the trainer has deleted its own copy. A
    SavedModel has one signature, serving_default, with the names of the model's inputs and outputs.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    from understudy.experiments import ExperimentError

    with reported(EvaluatorError, ExperimentError, CheckpointError):
        store = run.exporter()
        chosen = store.resolve(step)
        try:
            written = store.export(chosen, output, form)
        except OSError as error:
            raise CommandError(f"{output} cannot be written: {error}") from error
    click.echo(f"step {chosen} exported to {written}")
