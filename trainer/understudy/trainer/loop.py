"""The training loop, the same under every strategy.

Several steps run inside one graph. A step is the model's own ``train_step`` on every replica, as in Keras' ``fit``, so
the loss, sample weights, regularizers, mixed precision and overridden steps keep their meaning. Keras divides each
replica's loss by the number of replicas. As all have equally many examples, the sum of their gradients is the gradient
of the global batch.

Each replica updates its own metric state, which costs no communication. Once per call of the graph the state is added
up over all replicas, and the results are computed from the sum.

The steps of a call run one after the other, so the wait for a batch is time without training; it is measured inside
the graph. On a GPU, which may still run the previous step, it is an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import keras
import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class Call:
    """The result of one call of the graph.

    Attributes:
        metrics: Over all replicas, since the last reset.
        stopping: Whether any task is asked to stop; the same in all tasks.
        seconds: Duration of the call.
        input_wait_seconds: Of these, the wait for batches, in this task.
    """

    metrics: Mapping[str, float]
    stopping: bool
    seconds: float
    input_wait_seconds: float


RunSteps = Callable[[Iterator[object], int, bool], Call]


def make_loop(model: keras.Model, strategy: tf.distribute.Strategy) -> RunSteps:
    """Return a function that trains on a number of global batches from an iterator and returns the result.

    In a cluster, all tasks call it together. Its third argument says whether this task is asked to stop, its result
    whether any of them is: so all of them stop after the same step.

    Args:
        model: Built and prepared in the strategy's scope.
        strategy: That strategy.
    """
    train_step = train_step_of(model)

    @tf.function
    def run_steps(
        batches: Iterator[object], count: tf.Tensor, asked_to_stop: tf.Tensor
    ) -> tuple[Mapping[str, tf.Tensor], tf.Tensor, tf.Tensor]:
        waited = tf.constant(0.0, tf.float64)
        for _ in tf.range(count):
            batch, seconds = timed_next(batches)
            waited += seconds
            strategy.run(train_step, args=(batch,))
        asked = strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(tf.identity, args=(asked_to_stop,)), axis=None)
        return model.get_metrics_result(), asked, waited

    def run(batches: Iterator[object], count: int, asked_to_stop: bool) -> Call:  # noqa: FBT001 - as RunSteps says
        began = time.perf_counter()
        results, asked, waited = run_steps(batches, tf.constant(count), tf.constant(int(asked_to_stop)))
        return Call(
            metrics=scalars(results),
            stopping=bool(asked > 0),
            input_wait_seconds=float(waited),
            seconds=time.perf_counter() - began,
        )

    return run


@tf.autograph.experimental.do_not_convert
def timed_next(batches: Iterator[object]) -> tuple[object, tf.Tensor]:
    """Return, inside a graph, the next batch and the seconds of the wait for it."""
    asked_at = tf.timestamp()
    with tf.control_dependencies([asked_at]):
        batch = next(batches)
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
        return batch, tf.timestamp() - asked_at


def call_sizes(
    *, first_step: int, steps: int, checkpoint_every: int, steps_per_call: int, also_at: Collection[int] = ()
) -> Iterator[int]:
    """Yield the number of steps of each call, such that calls end at due checkpoints and at other given steps."""
    step = first_step
    while step < steps:
        due = min(steps, (step // checkpoint_every + 1) * checkpoint_every, *(end for end in also_at if end > step))
        size = min(steps_per_call, due - step)
        yield size
        step += size


def train_step_of(model: keras.Model) -> Callable[..., object]:
    """Return the model's step of training, compiled with XLA if the model is compiled so."""
    if model.jit_compile:
        return tf.function(model.train_step, jit_compile=True, reduce_retracing=True)  # type: ignore[no-any-return]
    return model.train_step  # type: ignore[no-any-return]


def scalars(results: Mapping[str, tf.Tensor]) -> dict[str, float]:
    """Return the metrics that are one number, without the few that have one per class."""
    values = {name: tf.convert_to_tensor(result) for name, result in results.items()}
    return {name: float(value) for name, value in values.items() if value.shape.rank == 0}
