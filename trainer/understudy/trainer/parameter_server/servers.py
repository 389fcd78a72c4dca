"""Workers and parameter servers: they serve TensorFlow's runtime until the chief has ended."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import tensorflow as tf

from understudy.checkpoints import RunDir, TrainingStatus, read_training_status
from understudy.trainer.settings import TrainSettings
from understudy.trainer.tf_config import ClusterTask
from understudy.trainer.trainer_errors import ClusterTimeoutError, PeerLostError

SILENCE_SECONDS = 30.0
"""How long after its last heartbeat a chief counts as dead."""

_POLL_SECONDS = 0.5


def serve_until_done(task: ClusterTask, settings: TrainSettings) -> int:
    """Serve as a worker or a parameter server; return the final step once the chief has finished.

    Raises:
        ClusterTimeoutError: No chief started in time.
        PeerLostError: The chief failed, or its heartbeat stopped.
    """
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.allow_growth = True
    # All threads of a worker may wait for the parameter servers; one more must remain to answer.
    config.inter_op_parallelism_threads = max(os.cpu_count() or 1, len(task.cluster["worker"]) + 1)
    server = tf.distribute.Server(
        tf.train.ClusterSpec({role: list(task.cluster[role]) for role in ("chief", "worker", "ps")}),
        job_name=task.role,
        task_index=task.index,
        protocol="grpc",
        config=config,
    )
    final_step = wait_for_chief(
        RunDir(settings.run_dir), steps=settings.steps, timeout_seconds=settings.cluster_timeout_seconds
    )
    del server
    return final_step


def wait_for_chief(
    run_dir: RunDir,
    *,
    steps: int,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Follow the chief's journal to its end; return the final step.

    The journal may still hold an earlier chief's state, so it counts only from its first change on. The chief's silence
    is measured by this machine's clock, so clocks need not agree.

    Args:
        run_dir: The chief's run folder.
        steps: A finished training with this many steps leaves nothing to wait for.
        timeout_seconds: How long to wait for the first change.
        clock: Seconds from any origin, never going back.
        sleep: Waits for this many seconds.

    Raises:
        ClusterTimeoutError: Nothing changed in time.
        PeerLostError: The chief failed, or its heartbeat stopped.
    """
    status = _read(run_dir)
    if status is not None and status.final_step is not None and status.final_step >= steps:
        return status.final_step
    changed_at, patience, chief_came = clock(), timeout_seconds, False
    while True:
        sleep(_POLL_SECONDS)
        before, status = status, _read(run_dir)
        if status is not None and status != before:
            changed_at, patience, chief_came = clock(), SILENCE_SECONDS, True
            if status.final_step is not None:
                return status.final_step
            if status.state == "failed":
                raise PeerLostError(f"the chief failed; start every task again ({status.reason})")
        if clock() - changed_at > patience:
            if chief_came:
                raise PeerLostError(f"the chief was silent for {patience:g} s; start every task again")
            raise ClusterTimeoutError(f"waited {patience:g} s for the chief to write {run_dir.training_json}")


def _read(run_dir: RunDir) -> TrainingStatus | None:
    return read_training_status(run_dir, now=0.0, stale_after_seconds=math.inf)
