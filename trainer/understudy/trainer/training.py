"""`train`: what a task of a training does from start to end."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from understudy.checkpoints import RunDir, read_manifest
from understudy.checkpoints.manifest import verify_files
from understudy.experiments import Experiment
from understudy.trainer.chief import Chief
from understudy.trainer.cluster import check_agreement, peers_watched, wait_for_all
from understudy.trainer.errors import NonFiniteLossError
from understudy.trainer.job import TrainingJob
from understudy.trainer.model import build_model
from understudy.trainer.pace import ProgressMeter
from understudy.trainer.progress import ProgressReporter, SilentReporter, TrainingPlan
from understudy.trainer.settings import TrainSettings
from understudy.trainer.snapshot import read_snapshot
from understudy.trainer.strategies import build_strategy, training_task


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training ended.

    Attributes:
        step: Steps done.
        first_step: Of these, steps done by earlier starts.
        metrics: The last metrics; empty if there was nothing left to do.
    """

    step: int
    first_step: int
    metrics: Mapping[str, float]


def train(
    experiment: Experiment,
    settings: TrainSettings,
    *,
    progress: ProgressReporter | None = None,
    environ: Mapping[str, str] | None = None,
) -> TrainResult:
    """Train an experiment until ``settings.steps`` steps are done, going on from the newest checkpoint if there is one.

    In a cluster, every task that trains calls this with the same experiment and settings, and returns when all are
    done. The chief alone writes: checkpoints, the journal and TensorBoard summaries. When it raises in a cluster, the
    process is to end, with the error's ``exit_code``, so that its peers do not wait for it.

    Args:
        experiment: What to train, on what.
        settings: How.
        progress: Is told what happens.
        environ: Where TF_CONFIG is read from; the process's environment if None.

    Raises:
        TrainerError: See `understudy.trainer.errors` for each kind.
        ExperimentError: The user's code raised.
        CheckpointError: The run folder is in use by another trainer, or its newest checkpoint is damaged.
    """
    task = training_task(settings, os.environ if environ is None else environ)
    with ExitStack() as stack:
        chief = stack.enter_context(Chief(settings)) if task is None or task.is_chief else None
        stack.enter_context(peers_watched())
        strategy = build_strategy(settings, task)
        # Built in every task, so that Keras gives the trained model's layers the same names in all of them.
        published_model = build_model(experiment, seed=settings.seed)
        job = TrainingJob(experiment, settings, strategy)
        first_step = _resume(job, settings)
        check_agreement(strategy, first_step=first_step)
        if chief is not None:
            chief.prepare(published_model, first_step=first_step)
        reporter = progress or SilentReporter()
        reporter.started(
            TrainingPlan(
                experiment=experiment.name,
                strategy=settings.strategy,
                replicas=strategy.num_replicas_in_sync,
                task="" if task is None else f"{task.role} {task.index}",
                first_step=first_step,
                steps=settings.steps,
                steps_per_epoch=job.plan.steps_per_epoch,
                global_batch_size=job.plan.global_batch_size,
            ),
        )
        result = _run(job, settings, first_step, reporter, chief)
        wait_for_all(strategy)
        reporter.finished(result.step)
        return result


def _resume(job: TrainingJob, settings: TrainSettings) -> int:
    """Restore the newest committed checkpoint; return its step, or 0 if there is none."""
    run_dir = RunDir(settings.run_dir)
    committed = run_dir.committed_steps()
    if not committed:
        return 0
    checkpoint = run_dir.checkpoint(committed[-1])
    verify_files(checkpoint, read_manifest(checkpoint))
    snapshot = read_snapshot(checkpoint, like=job.capture(0))
    job.restore(snapshot)
    return snapshot.step


def _run(
    job: TrainingJob,
    settings: TrainSettings,
    first_step: int,
    reporter: ProgressReporter,
    chief: Chief | None,
) -> TrainResult:
    """Do the steps that are left, and publish where it is due."""
    meter = ProgressMeter(settings.steps, job.plan)
    step = first_step
    metrics: Mapping[str, float] = {}
    for step, metrics in job.run(first_step):
        _check_finite(step, metrics)
        update = meter.measure(step, metrics)
        reporter.advanced(update)
        if chief is not None:
            chief.advanced(update)
        if step % settings.checkpoint_every == 0 or step == settings.steps:
            # All tasks take part in collecting the state.
            snapshot = job.capture(step)
            snapshot.check_finite()
            if chief is not None:
                chief.publish(snapshot, update)
                reporter.published(step, metrics)
    return TrainResult(step=step, first_step=first_step, metrics=metrics)


def _check_finite(step: int, metrics: Mapping[str, float]) -> None:
    loss = metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss became {loss} by step {step}; the newest checkpoint is from before that. Lower the learning "
            "rate or clip the gradients",
        )
