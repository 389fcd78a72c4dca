"""``understudy run``."""

from __future__ import annotations

import os
from collections.abc import Callable

import click
from click.core import ParameterSource

from understudy.cli.command_errors import reported
from understudy.cli.options import settings_makers
from understudy.cli.serve import run_service
from understudy.cli.supervisor import Supervisor, end_with_supervisor, is_supervised, own_command
from understudy.cli.train import ProgressFormat, let_sigterm_through, progress_option, run_training
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.settings import ServeSettings
from understudy.trainer import TFConfigError, TrainSettings
from understudy.trainer.tf_config import ClusterTask, parse


@click.command("run")
@click.argument("experiment")
@progress_option
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    envvar="UNDERSTUDY_RESTARTS",
    help="Start the task again up to N times, with growing pauses, when it ends with 4, 7, 143 or by a signal.",
)
@settings_makers(
    evaluator_settings=EvaluatorSettings,
    serve_settings=ServeSettings,
    train_settings=TrainSettings,
    omit=("experiment", "checkpoints"),
)
@click.pass_context
def command(
    context: click.Context,
    experiment: str,
    *,
    progress: ProgressFormat,
    restarts: int,
    evaluator_settings: Callable[..., EvaluatorSettings],
    serve_settings: Callable[..., ServeSettings],
    train_settings: Callable[..., TrainSettings],
) -> None:
    """Do what TF_CONFIG assigns to this task of a cluster.

    \b
    understudy run digits --run-dir RUN --steps 10000 --checkpoint-every 500

    The chief and the workers train EXPERIMENT, as `understudy train` does, under the multi_worker strategy unless
    another is named; where the cluster has ps, under parameter_server, and ps tasks hold the variables. The evaluator
    scores and serves what they publish, as `understudy serve` does. So one image and one command fit every task of a
    cluster. RUN must be the same folder for all of them.

    Exit status: that of `understudy train` or `serve`. With --restarts, 4 (another task died), 7 (the other tasks did
    not come in time), 143 (SIGTERM) and a death by a signal lead to a new start, unless SIGTERM was sent to this
    process itself; so when one task dies the others end within a minute, and all of them begin again.
    """  # noqa: D301 - click wants the character itself, which keeps the line below it as it is
    with reported(TFConfigError):
        task = _own_task()
    if restarts and not is_supervised(os.environ):
        let_sigterm_through()
        context.exit(Supervisor(own_command(), restarts=restarts).run())
    end_with_supervisor(os.environ)
    if task.role == "evaluator":
        let_sigterm_through()
        run_service(serve_settings(experiment=experiment, checkpoints=None), evaluator_settings())
    else:
        run_training(experiment, train_settings(**_strategy(context, task)), progress)


def _own_task() -> ClusterTask:
    task = parse(os.environ)
    if task is None:
        raise TFConfigError(
            "TF_CONFIG is unset or has no cluster; outside a cluster, use `understudy train` or `serve`"
        )
    return task


def _strategy(context: click.Context, task: ClusterTask) -> dict[str, str]:
    """Choose what the cluster is made for, where the user chose nothing and there is somebody to train with."""
    chosen = context.get_parameter_source("strategy") is not ParameterSource.DEFAULT
    if chosen or len(task.trainers) == 1:
        return {}
    return {"strategy": "parameter_server" if task.cluster.get("ps") else "multi_worker"}
