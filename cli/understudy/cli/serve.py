"""``understudy serve``."""

from __future__ import annotations

import click

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.cli.command_errors import (
    DEVICE_FAILED,
    TERMINATED,
    TIMED_OUT,
    TRAINING_FAILED,
    CommandError,
    reported,
)
from understudy.cli.options import settings_options
from understudy.cli.processes import exit_at_once, start_again
from understudy.evaluator.evaluator_errors import EvaluatorError
from understudy.evaluator.settings import EvaluatorSettings
from understudy.experiments import ExperimentError
from understudy.service.service_errors import ServiceError
from understudy.service.settings import ServeSettings


@click.command("serve")
@settings_options(evaluator_settings=EvaluatorSettings, settings=ServeSettings)
def command(settings: ServeSettings, evaluator_settings: EvaluatorSettings) -> None:
    """Pick up, score and serve the checkpoints of a run.

    \b
    understudy serve --run-dir RUN --experiment digits
    understudy serve --checkpoints DIR --eval-data test=file.npz

    Prints LISTENING once both ports answer and READY once the first checkpoint is serving. On SIGTERM it finishes the
    calls in progress and exits with status 0. With --exit-when-finished it also exits once training has ended and
    every checkpoint is evaluated. When the run folder was deleted, with the state folder in it, and a new training has
    published a checkpoint there, it starts again by itself.

    Exit status: 0 SIGTERM, or training finished; 1 failed, see stderr; 2 usage error; 5 training failed;
    6 --exit-timeout-seconds ran out; 8 a device failed repeatedly (--max-device-failures); 143 SIGTERM before training
    had finished, with --exit-when-finished.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    run_service(settings, evaluator_settings)


def run_service(settings: ServeSettings, evaluator_settings: EvaluatorSettings) -> None:
    """Serve until SIGTERM or the end of training. Start this program again if the run folder is trained anew.

    Ends the process if an exporter has not returned.

    Raises:
        CommandError: An expected failure; or a signal before the end of training, where that end is waited for.
    """
    with reported(EvaluatorError, ExperimentError):
        settings.location.check()
    from understudy.service.events.deliveries import have_left_exporters

    failure = None
    try:
        _serve(settings, evaluator_settings)
    except CommandError as error:
        failure = error
    if have_left_exporters():
        exit_at_once(failure)
    if failure is not None:
        raise failure


def _serve(settings: ServeSettings, evaluator_settings: EvaluatorSettings) -> None:
    from understudy.evaluator.evaluation.training_end import ExitReason
    from understudy.service.server import serve

    with reported(ServiceError, EvaluatorError, ExperimentError, CheckpointError):
        service_exit = serve(settings, evaluator_settings)
    if service_exit.reason is ExitReason.TRAINED_ANEW:
        start_again()
    if service_exit.reason is ExitReason.FAILED:
        raise CommandError(service_exit.message, exit_code=TRAINING_FAILED)
    if service_exit.reason is ExitReason.TIMED_OUT:
        raise CommandError(service_exit.message, exit_code=TIMED_OUT)
    if service_exit.reason is ExitReason.DEVICE_FAILED:
        raise CommandError(service_exit.message, exit_code=DEVICE_FAILED)
    if service_exit.reason is ExitReason.SIGNALLED and settings.exit_when_finished:
        raise CommandError("stopped before training had finished and was evaluated", exit_code=TERMINATED)
