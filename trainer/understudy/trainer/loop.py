"""The training loop, the same under every strategy.

Several steps run inside one graph. A step is the model's own ``train_step`` on every replica: what Keras' ``fit`` runs,
so that the loss, the sample weights, the regularisers, mixed precision and overridden steps mean what they mean there.
Keras divides each replica's loss by the number of replicas; as all have equally many examples, the sum of their
gradients is the gradient of the global batch.

Each replica updates metric state of its own, which costs no communication; the state is added up over all replicas once
per call of the graph, where the results are computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import keras
import tensorflow as tf

RunSteps = Callable[[Iterator[object], int, bool], tuple[Mapping[str, float], bool]]


def make_loop(model: keras.Model, strategy: tf.distribute.Strategy) -> RunSteps:
    """Return a function that takes global batches from an iterator, trains on that many, and returns the metrics.

    The metrics are those since they were last reset, over all replicas. In a cluster, all tasks call it together. Its
    third argument says whether this task was asked to stop, its second result whether any of them was: so all of them
    stop after the same step.

    Args:
        model: Built and prepared in the strategy's scope.
        strategy: That strategy.
    """
    train_step = _train_step(model)

    @tf.function
    def run_steps(
        batches: Iterator[object], count: tf.Tensor, asked_to_stop: tf.Tensor
    ) -> tuple[Mapping[str, tf.Tensor], tf.Tensor]:
        for _ in tf.range(count):
            strategy.run(train_step, args=(next(batches),))
        asked = strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(tf.identity, args=(asked_to_stop,)), axis=None)
        return model.get_metrics_result(), asked

    def run(batches: Iterator[object], count: int, asked_to_stop: bool) -> tuple[Mapping[str, float], bool]:  # noqa: FBT001 - as RunSteps says
        results, asked = run_steps(batches, tf.constant(count), tf.constant(int(asked_to_stop)))
        metrics = {name: value for name, result in results.items() if (value := _scalar(result)) is not None}
        return metrics, bool(asked > 0)

    return run


def call_sizes(*, first_step: int, steps: int, checkpoint_every: int, steps_per_call: int) -> Iterator[int]:
    """Yield how many steps to run in each call, such that calls end wherever a checkpoint is due."""
    step = first_step
    while step < steps:
        due = min(steps, (step // checkpoint_every + 1) * checkpoint_every)
        size = min(steps_per_call, due - step)
        yield size
        step += size


def _train_step(model: keras.Model) -> Callable[..., object]:
    if model.jit_compile:
        return tf.function(model.train_step, jit_compile=True, reduce_retracing=True)  # type: ignore[no-any-return]
    return model.train_step  # type: ignore[no-any-return]


def _scalar(result: tf.Tensor) -> float | None:
    """Return a scalar metric as a float; None for the few that give one number per class."""
    value = tf.convert_to_tensor(result)
    return float(value) if value.shape.rank == 0 else None
