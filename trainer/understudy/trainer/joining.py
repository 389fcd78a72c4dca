"""Joins TensorFlow's cluster in bounded time, although the join cannot be interrupted."""

from __future__ import annotations

import faulthandler
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from understudy.compat import bound_cluster_registration
from understudy.trainer.settings import TrainSettings
from understudy.trainer.tf_config import ClusterTask
from understudy.trainer.trainer_errors import ClusterTimeoutError

_JOIN_SECONDS = 30.0

_GRACE_SECONDS = 15.0


def join_seconds(settings: TrainSettings) -> float:
    """Return how long TensorFlow may take to join a cluster whose tasks have all just been seen."""
    return min(_JOIN_SECONDS, settings.cluster_timeout_seconds)


def join(
    task: ClusterTask,
    make_strategy: Callable[[tf.distribute.cluster_resolver.ClusterResolver], tf.distribute.Strategy],
    *,
    seconds: float,
) -> tf.distribute.Strategy:
    """Join the cluster of the synchronous training tasks, and return its strategy.

    Raises:
        ClusterTimeoutError: Another task did not join in time. It may have died since it was seen.
    """
    # Neither evaluators nor parameter servers take part in synchronous training.
    jobs = {role: list(task.cluster[role]) for role in ("chief", "worker") if task.cluster.get(role)}
    bound_cluster_registration(jobs, seconds)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=task.role,
        task_id=task.index,
        rpc_layer="grpc",
    )
    with ended_after(seconds + _GRACE_SECONDS):
        try:
            return make_strategy(resolver)
        except tf.errors.OpError as error:
            raise ClusterTimeoutError(
                f"every task of the cluster answered, but they could not be joined in {seconds:g} s: "
                f"{_reason(error.message)}; start every task again",
            ) from error


def _reason(message: str) -> str:
    """Return the tasks that TensorFlow's long message reports missing, or else its first line."""
    _, found, missing = message.partition("timed out task names:")
    if found:
        names = re.findall(r"/job:(\w+)/\S*task:(\d+)", missing.strip().partition("\n\n")[0])
        return f"missing are {', '.join(f'{role} {index}' for role, index in names)}"
    return message.strip().partition("\n")[0]


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Let SIGALRM end the process if the block takes too long; the stack is first written to stderr.

    The join holds the interpreter lock, so no Python code could end it.
    """
    faulthandler.dump_traceback_later(seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
