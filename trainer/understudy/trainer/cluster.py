"""Collective operations of a cluster's tasks, and detection of a dead task.

TensorFlow notices a dead task when its connection breaks or its heartbeats stop, at the latest about 20 s later. Then
the current or next collective operation of each survivor fails, and every survivor raises `PeerLostError`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from understudy.trainer.trainer_errors import ClusterError, PeerLostError

_PEER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_ABORTED = "Collective ops is aborted"
_HEADING = "Graph execution error:"
_TASK = re.compile(r"remote target /job:(\w+)/replica:\d+/task:(\d+)")


@contextmanager
def peers_watched() -> Iterator[None]:
    """Convert TensorFlow's errors after the death of another task into `PeerLostError`."""
    try:
        yield
    except tf.errors.OpError as error:
        if is_of_lost_peer(error):
            raise PeerLostError(
                f"another task of the cluster died; start every task again ({_reason(error.message)})",
            ) from error
        raise


def is_of_lost_peer(error: tf.errors.OpError) -> bool:
    """Whether TensorFlow raised an error because another task died."""
    return isinstance(error, _PEER_ERRORS) or _ABORTED in error.message


def _reason(message: str) -> str:
    """Return the line of TensorFlow's long message that says what happened, after the task that it happened to."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and line.strip() != _HEADING]
    reason = next((line for line in lines if _ABORTED in line), lines[0] if lines else "no reason given")
    task = _TASK.search(message)  # the first is where the error began, the others passed it on
    return reason if task is None else f"{task[1]} {task[2]}: {reason}"


def check_agreement(strategy: tf.distribute.Strategy, *, first_step: int) -> None:
    """Check that all tasks continue from the same step.

    Raises:
        ClusterError: They do not, for example because they use different run folders.
    """
    if _sum(strategy, first_step) != first_step * strategy.num_replicas_in_sync:
        raise ClusterError(
            f"this task would continue from step {first_step}, another from a different one; "
            "run_dir must be one folder that all tasks share",
        )


def wait_for_all(strategy: tf.distribute.Strategy) -> None:
    """Return when every task has called this. Fails if a task ends first."""
    _sum(strategy, 0)


def any_task(strategy: tf.distribute.Strategy, answer: bool) -> bool:  # noqa: FBT001 - a question with two answers
    """Return whether any task answers yes, once every task has called this."""
    return _sum(strategy, int(answer)) > 0


def _sum(strategy: tf.distribute.Strategy, value: int) -> int:
    """Return the sum of the values of all replicas of all tasks."""
    return int(_adder(strategy)(tf.constant(value, tf.int64)))


@functools.lru_cache(maxsize=1)
def _adder(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that is traced once per strategy."""

    @tf.function(autograph=False)
    def add_up(value: tf.Tensor) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(tf.identity, args=(value,)), axis=None)

    return add_up  # type: ignore[no-any-return]
