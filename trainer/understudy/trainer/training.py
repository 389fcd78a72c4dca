"""`train`: the work of a training task from start to end."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import tensorflow as tf

from understudy.checkpoints import RunDir, read_manifest
from understudy.checkpoints.initial_values import weights_are_loaded
from understudy.checkpoints.manifest import verify_files
from understudy.experiments import Experiment
from understudy.trainer.chief import Chief
from understudy.trainer.cluster import peers_watched
from understudy.trainer.devices import describe
from understudy.trainer.job import Job, TrainingJob
from understudy.trainer.leaving import wait_for_evaluation, wait_to_end_early, wait_to_leave
from understudy.trainer.model import build_model
from understudy.trainer.parameter_server.parameter_server_job import ParameterServerJob
from understudy.trainer.parameter_server.servers import serve_until_done
from understudy.trainer.preemption import PreemptionWatch
from understudy.trainer.progress import ProgressReporter, SilentReporter, TrainingPlan
from understudy.trainer.progress_meter import InputWatch, ProgressMeter
from understudy.trainer.rendezvous import bypass_proxies
from understudy.trainer.settings import TrainSettings
from understudy.trainer.snapshot import read_snapshot
from understudy.trainer.stopping import EarlyStop
from understudy.trainer.strategies import build_strategy, training_task
from understudy.trainer.tf_config import ClusterTask
from understudy.trainer.trainer_errors import RESTART_COUNT, NonFiniteLossError, PreemptedError
from understudy.trainer.training_metrics import TrainingMetrics


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training ended.

    Attributes:
        step: Steps done.
        first_step: Of these, steps done by earlier starts.
        metrics: The last metrics; empty if there was nothing left to do.
        stopped_early: Whether the evaluator's scores ended it before its last step.
    """

    step: int
    first_step: int
    metrics: Mapping[str, float]
    stopped_early: bool = False


def train(
    experiment: Experiment,
    settings: TrainSettings,
    *,
    progress: ProgressReporter | None = None,
    environ: Mapping[str, str] | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Train an experiment until ``settings.steps`` steps are done, resuming from the newest checkpoint if there is one.

    In a cluster, every training task calls this with the same experiment and settings, and it returns when all are
    done. Only the chief writes: checkpoints, the journal and TensorBoard summaries. If it raises in a cluster, end the
    process with the error's ``exit_code``, so that its peers do not wait for it.

    Args:
        experiment: The model and data to train.
        settings: The settings.
        progress: Receives progress events.
        environ: The source of TF_CONFIG; the process's environment if None.
        on_end: Called when everything is written, before this returns and releases its objects. A task of a cluster can
            end its process here, as releasing the input pipeline can take a minute.

    Raises:
        TrainerError: See `understudy.trainer.trainer_errors` for each kind.
        ExperimentError: The user's code raised.
        CheckpointError: The run folder is in use by another trainer, or its newest checkpoint is damaged.
    """
    environ = os.environ if environ is None else environ
    task = training_task(settings, environ)
    if task is not None:
        bypass_proxies(task)
    if task is not None and settings.strategy == "parameter_server" and not task.is_chief:
        step = serve_until_done(task, settings)
        on_end()
        return TrainResult(step=step, first_step=0, metrics={})
    with ExitStack() as stack:
        joins_cluster = task is not None and settings.strategy == "multi_worker"
        preemption = stack.enter_context(PreemptionWatch(joins_cluster=joins_cluster))
        chief = None
        if task is None or task.is_chief:
            patience = 0.0 if task is None else settings.cluster_timeout_seconds
            chief = stack.enter_context(Chief(settings, lock_seconds=patience, while_waiting=preemption.check))
        stack.enter_context(peers_watched())
        strategy = build_strategy(settings, task, while_waiting=preemption.check)
        # Built in every task, so that Keras names the trained model's layers alike in all of them.
        with weights_are_loaded():  # from each snapshot
            published_model = build_model(experiment, seed=settings.seed)
        job = _make_job(experiment, settings, strategy)
        first_step = _resume(job, settings)
        job.check_agreement(first_step)
        if job.any_task(preemption.requested):
            wait_to_end_early(job.wait_for_all, is_saved=lambda: True)
            raise PreemptedError("asked to end by SIGTERM before the first step; there was nothing to save")
        if chief is not None:
            chief.prepare(published_model, first_step=first_step)
        reporter = progress or SilentReporter()
        reporter.started(_plan_of(experiment, settings, job, task, first_step=first_step))
        served = TrainingMetrics(
            settings.metrics_port,
            host=settings.metrics_host,
            first_step=first_step,
            global_batch_size=job.plan.global_batch_size,
            restarts=int(environ.get(RESTART_COUNT, "0")),
        )
        stack.enter_context(served)
        preemption.save_from_now_on()
        result = _run(job, settings, first_step, reporter=reporter, chief=chief, preemption=preemption, served=served)
        wait_to_leave(job.wait_for_all, RunDir(settings.run_dir), is_chief=chief is not None)
        reporter.finished(result.step)
    if chief is not None and settings.wait_for_evaluation is not None:
        _wait_for_evaluation(settings, settings.wait_for_evaluation)
    on_end()
    return result


def _plan_of(
    experiment: Experiment, settings: TrainSettings, job: Job, task: ClusterTask | None, *, first_step: int
) -> TrainingPlan:
    return TrainingPlan(
        experiment=experiment.name,
        strategy=settings.strategy,
        replicas=job.replicas,
        task="" if task is None else f"{task.role} {task.index}",
        first_step=first_step,
        steps=settings.steps,
        steps_per_epoch=job.plan.steps_per_epoch,
        global_batch_size=job.plan.global_batch_size,
        devices=describe(settings),
    )


def _make_job(experiment: Experiment, settings: TrainSettings, strategy: tf.distribute.Strategy) -> Job:
    if settings.strategy == "parameter_server":
        return ParameterServerJob(experiment, settings, strategy)
    return TrainingJob(experiment, settings, strategy)


def _resume(job: Job, settings: TrainSettings) -> int:
    """Restore the newest committed checkpoint; return its step, or 0 if there is none."""
    run_dir = RunDir(settings.run_dir)
    committed = run_dir.committed_steps()
    if not committed:
        return 0
    checkpoint = run_dir.checkpoint(committed[-1])
    verify_files(checkpoint, read_manifest(checkpoint, settings.accepted_keys()))
    snapshot = read_snapshot(checkpoint, like=job.capture(0))
    job.restore(snapshot)
    return snapshot.step


def _run(
    job: Job,
    settings: TrainSettings,
    first_step: int,
    *,
    reporter: ProgressReporter,
    chief: Chief | None,
    preemption: PreemptionWatch,
    served: TrainingMetrics,
) -> TrainResult:
    """Do the remaining steps, and publish each due checkpoint."""
    meter = ProgressMeter(settings.steps, job.plan)
    input_watch = InputWatch(job.plan, first_step=first_step)
    step = first_step
    metrics: Mapping[str, float] = {}
    early_stop = EarlyStop(job, settings, reporter, is_chief=chief is not None)
    stopped_early = 0 < step < settings.steps and early_stop.is_due(step)
    if stopped_early:
        return TrainResult(step=step, first_step=first_step, metrics=metrics, stopped_early=True)
    # Named, so that an exception keeps it: releasing its iterator would wait for a chief that has already left.
    advances = job.run(first_step, asked_to_stop=lambda: preemption.requested)
    for event in advances:
        step, metrics = event.step, event.metrics
        _check_finite(step, metrics)
        update = meter.measure(event)
        input_watch.saw(event)
        reporter.advanced(update)
        served.advanced(update)
        if chief is not None:
            chief.advanced(update)
        stopped_early = event.due and step < settings.steps and early_stop.is_due(step)
        if event.due or event.stopping:
            began = time.monotonic()
            # All tasks take part in collecting the state.
            snapshot = job.capture(step)
            snapshot.check_finite()
            if chief is not None:
                chief.publish(snapshot, update, final=stopped_early or step >= settings.steps)
                reporter.published(step, metrics)
            served.checkpointed(time.monotonic() - began)
        if stopped_early:
            break
        if event.stopping and step < settings.steps:
            wait_to_end_early(job.wait_for_all, is_saved=functools.partial(RunDir(settings.run_dir).is_committed, step))
            raise PreemptedError(
                f"asked to end by SIGTERM; step {step} is saved; start every task again to resume",
            )
    return TrainResult(step=step, first_step=first_step, metrics=metrics, stopped_early=stopped_early)


def _wait_for_evaluation(settings: TrainSettings, timeout_seconds: float) -> None:
    """Wait for the evaluator to settle the newest checkpoint."""
    run_dir = RunDir(settings.run_dir)
    step = run_dir.committed_steps()[-1]
    wait_for_evaluation(
        settings.evaluator_state_dir,
        step=step,
        digest=read_manifest(run_dir.checkpoint(step)).digest,
        timeout_seconds=timeout_seconds,
    )


def _check_finite(step: int, metrics: Mapping[str, float]) -> None:
    loss = metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss became {loss} by step {step}; the newest checkpoint is from before that. Lower the learning "
            "rate or clip the gradients",
        )
