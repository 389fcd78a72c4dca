"""``understudy export``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.signing import accepted_keys
from understudy.cli.command_errors import CommandError, reported
from understudy.evaluator.evaluator_errors import EvaluatorError
from understudy.service.service_errors import SettingsError
from understudy.service.settings import ServeSettings

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


def _folder(flag: str, help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(flag, type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help=help_text)


@click.command("export")
@_folder("--run-dir", "The run folder.")
@_folder("--checkpoints", "Instead of --run-dir, the folder of checkpoints that the server was given.")
@_folder("--state-dir", "The evaluator's state folder, if not the default.")
@click.option(
    "--experiment",
    metavar="EXPERIMENT",
    help="Builds the model of weights-only checkpoints, as for serve.",
)
@click.option(
    "--allow-unsafe-models",
    is_flag=True,
    help="Convert models that name any class, function or operation, as for serve.",
)
@click.option(
    "--require-signature",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Export only a checkpoint that is signed with the private key of this public key, as for serve.",
)
@click.option("--run-name", metavar="NAME", help="The name of the run for which it is signed, as for serve.")
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
    type=click.Path(path_type=Path),
    required=True,
    metavar="PATH",
    help="For keras, a path that ends in .keras, or the folder to put model.keras into; for saved_model, the folder "
    "that becomes the SavedModel.",
)
def command(
    *,
    run_dir: Path | None,
    checkpoints: Path | None,
    state_dir: Path | None,
    experiment: str | None,
    allow_unsafe_models: bool,
    require_signature: tuple[Path, ...],
    run_name: str | None,
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
    from understudy.evaluator.model.export import CheckpointExporter
    from understudy.experiments import ExperimentError, load_experiment

    try:
        settings = ServeSettings(run_dir=run_dir, checkpoints=checkpoints, state_dir=state_dir)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    with reported(EvaluatorError, ExperimentError, CheckpointError):
        build_model = None if experiment is None else load_experiment(experiment).build_model
        store = CheckpointExporter(
            run_dir=run_dir,
            state_dir=settings.evaluator_state_dir,
            build_model=build_model,
            allow_unsafe_models=allow_unsafe_models,
            accepted=accepted_keys(require_signature, run=run_name, folder=settings.location.folder),
        )
        chosen = store.resolve(step)
        try:
            written = store.export(chosen, output, form)
        except OSError as error:
            raise CommandError(f"{output} cannot be written: {error}") from error
    click.echo(f"step {chosen} exported to {written}")
