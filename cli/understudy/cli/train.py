"""``understudy train``."""

from __future__ import annotations

import functools
import os
import sys
from typing import Literal

import click

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.cli.command_errors import CommandError, reported
from understudy.cli.options import settings_options
from understudy.cli.processes import exit_at_once
from understudy.cli.signals import let_ending_signals_through
from understudy.cli.supervisor import is_supervised
from understudy.experiments import ExperimentError, check_spec, load_experiment
from understudy.trainer import (
    JsonLinesReporter,
    LineReporter,
    PreemptedError,
    ProgressReporter,
    TFConfigError,
    TrainerError,
    TrainSettings,
)
from understudy.trainer.cluster_variables import adopt
from understudy.trainer.rendezvous import wait_until_gone
from understudy.trainer.settings import ClusterSettings
from understudy.trainer.tf_config import parse

_LAST_SECONDS = 10.0
_CLUSTERS = ("multi_worker", "parameter_server")

ProgressFormat = Literal["lines", "json"]


progress_option = click.option(
    "--progress",
    type=click.Choice(["lines", "json"]),
    default="lines",
    show_default=True,
    help="Lines for people, or JSON lines for programs; on stdout.",
)


@click.command("train")
@click.argument("experiment")
@progress_option
@settings_options(settings=TrainSettings, cluster_settings=ClusterSettings)
def command(
    experiment: str, progress: ProgressFormat, settings: TrainSettings, cluster_settings: ClusterSettings
) -> None:
    """Train EXPERIMENT and publish its checkpoints.

    \b
    understudy train digits --run-dir RUN --steps 400 --checkpoint-every 100
    understudy train my/experiment.py:EXPERIMENT --run-dir RUN --steps 10000 --strategy mirrored

    EXPERIMENT is a bundled name (digits), package.module:object or path/to/file.py:object. Training resumes from the
    newest checkpoint in RUN. With --strategy multi_worker, run the same command in every task of the cluster: the
    variables of JobSet, Kubeflow's TrainJob, Slurm or Vertex AI describe it, in this order, or else TF_CONFIG.

    Exit status: 0 done; 1 failed, see stderr; 2 usage error; 3 the loss became NaN or infinite; 4 another task of the
    cluster died, so start all of them again; 6 done, but --wait-for-evaluation ran out; 7 the other tasks did not
    arrive in time, so start all of them again; 143 SIGTERM, after progress was saved.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    if settings.strategy in _CLUSTERS:
        with reported(TFConfigError):
            adopt_cluster(cluster_settings)
    run_training(experiment, settings, progress)


def adopt_cluster(settings: ClusterSettings) -> None:
    """Set TF_CONFIG from the variables of the system that started this task, and say on stderr what was found.

    Raises:
        TFConfigError: The variables contradict each other or the settings.
    """
    found = adopt(os.environ, settings)
    if found and not is_supervised(os.environ):
        click.echo(found, err=True)


def run_training(experiment: str, settings: TrainSettings, progress: ProgressFormat) -> None:
    """Train, and convert expected failures into an exit status.

    Raises:
        TrainFailedError: The training failed outside a cluster; in a cluster the process exits instead.
        CommandError: TF_CONFIG is invalid, or there is no such experiment.
    """
    with reported(ExperimentError):
        check_spec(experiment)
    from understudy.trainer import train
    from understudy.trainer.devices import configure

    if settings.strategy != "multi_worker":
        let_ending_signals_through()
    try:
        configure(settings)  # before the user's module, which may use TensorFlow
        train(
            load_experiment(experiment),
            settings,
            progress=_reporter(progress),
            on_end=functools.partial(_leave_cluster, settings, None),
        )
    except TFConfigError as error:
        raise CommandError(str(error)) from error
    except (TrainerError, ExperimentError, CheckpointError) as error:
        failure = TrainFailedError(str(error), exit_code=error.exit_code if isinstance(error, TrainerError) else 1)
        if isinstance(error, PreemptedError) and not error.alone:
            _leave_cluster(settings, failure)
        if settings.strategy in _CLUSTERS or isinstance(error, PreemptedError):
            exit_at_once(failure)
        raise failure from error


class TrainFailedError(CommandError):
    """An expected failure with its own exit status."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click reads it from the instance as well


def _leave_cluster(settings: TrainSettings, failure: TrainFailedError | None) -> None:
    """End the process, if it is a task of a cluster. A synchronous chief is the coordinator and exits last."""
    if settings.strategy not in _CLUSTERS:
        return
    task = parse(os.environ)
    if task is not None and task.is_chief and settings.strategy == "multi_worker":
        wait_until_gone(task, timeout_seconds=_LAST_SECONDS)
    exit_at_once(failure)


def _reporter(progress: ProgressFormat) -> ProgressReporter:
    return LineReporter(sys.stdout) if progress == "lines" else JsonLinesReporter(sys.stdout)
