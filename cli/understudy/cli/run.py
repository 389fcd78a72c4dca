"""``understudy run``."""

from __future__ import annotations

import os
from collections.abc import Callable

import click
from click.core import ParameterSource

from understudy.cli.command_errors import reported
from understudy.cli.options import settings_makers
from understudy.cli.processes import own_command
from understudy.cli.serve import run_service
from understudy.cli.signals import let_ending_signals_through
from understudy.cli.supervisor import Supervisor, end_with_supervisor, is_supervised
from understudy.cli.train import ProgressFormat, adopt_cluster, progress_option, run_training
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.settings import ServeSettings
from understudy.trainer import TFConfigError, TrainSettings
from understudy.trainer.settings import ClusterSettings
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
    help="Restart the task up to N times, with exponential backoff, after status 4, 7, 143 or a fatal signal.",
)
@settings_makers(
    evaluator_settings=EvaluatorSettings,
    serve_settings=ServeSettings,
    train_settings=TrainSettings,
    cluster_settings=ClusterSettings,
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
    cluster_settings: Callable[..., ClusterSettings],
) -> None:
    """Do what the cluster assigns to this task.

    \b
    understudy run digits --run-dir RUN --steps 10000 --checkpoint-every 500

    The chief and the workers train EXPERIMENT, as `understudy train` does, by default under the multi_worker strategy;
    where the cluster has ps, under parameter_server, and ps tasks hold the variables. The evaluator scores and serves
    their checkpoints, as `understudy serve` does. So one image and one command fit every task of a cluster. RUN must be
    the same folder for all of them.

    The variables of JobSet, Kubeflow's TrainJob, Slurm or Vertex AI say which task this is, in this order, or else
    TF_CONFIG. The first line on stderr names the task, and where that was found.

    Exit status: that of `understudy train` or `serve`. With --restarts, the task restarts after 4 (another task died),
    7 (the other tasks did not arrive in time), 143 (SIGTERM) and a fatal signal, unless this process itself receives
    SIGTERM. So when one task dies, the others end within a minute and all of them start again.
    """  # noqa: D301 - click needs this character, which keeps the line break below it
    with reported(TFConfigError):
        task = _own_task(cluster_settings())
    if restarts and not is_supervised(os.environ):
        let_ending_signals_through()
        context.exit(Supervisor(own_command(), restarts=restarts).run())
    end_with_supervisor(os.environ)
    if task.role == "evaluator":
        let_ending_signals_through()
        run_service(serve_settings(experiment=experiment, checkpoints=None), evaluator_settings())
    else:
        run_training(experiment, train_settings(**_strategy(context, task)), progress)


def _own_task(settings: ClusterSettings) -> ClusterTask:
    adopt_cluster(settings)
    task = parse(os.environ)
    if task is None:
        raise TFConfigError(
            "TF_CONFIG is unset or has no cluster, and no other variables describe one; outside a cluster, use "
            "`understudy train` or `serve`"
        )
    return task


def _strategy(context: click.Context, task: ClusterTask) -> dict[str, str]:
    """Choose the strategy that fits the cluster, if the user chose none and there are other training tasks."""
    chosen = context.get_parameter_source("strategy") is not ParameterSource.DEFAULT
    if chosen or len(task.trainers) == 1:
        return {}
    return {"strategy": "parameter_server" if task.cluster.get("ps") else "multi_worker"}
