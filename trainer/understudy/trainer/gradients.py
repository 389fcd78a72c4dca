"""Makes an optimizer treat a global batch as one device would.

Keras 3 clips the gradient of each replica and then adds them up. The result is not the clipped gradient of the global
batch: the weights differ in the first digit. Here the sum comes first, so the optimizer (clipping, loss scaling,
weight decay, its slots) sees on every replica the gradient that one device would see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from understudy.compat import leave_gradients_as_they_are
from understudy.trainer.trainer_errors import ModelError


def sum_before_applying(optimizer: keras.optimizers.Optimizer) -> None:
    """Make ``optimizer.apply`` add up the gradients of all replicas first.

    Raises:
        ModelError: It has a setting that TensorFlow does not support on several replicas.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    _check_supported(inner)
    apply = optimizer.apply

    def apply_sum(grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        return apply(_sum_over_replicas(grads), trainable_variables)

    optimizer.apply = apply_sum
    leave_gradients_as_they_are(inner)


def _sum_over_replicas(grads: Sequence[Any]) -> list[Any]:
    """Return the sums. None, the gradient of a variable that the loss does not depend on, remains None."""
    replica = tf.distribute.get_replica_context()
    sums = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, [grad for grad in grads if grad is not None]))
    return [None if grad is None else next(sums) for grad in grads]


def _check_supported(optimizer: keras.optimizers.Optimizer) -> None:
    for setting in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(optimizer, setting, None):
            raise ModelError(
                f"the optimizer sets {setting}, which TensorFlow cannot do on several replicas (it updates variables "
                "under a condition); leave it out, or train with strategy one_device",
            )
