"""Making an optimizer treat a global batch as one device would.

Keras 3 clips the gradient of each replica and then adds them up, which is not the clipped gradient of the global batch:
the weights differ in the first digit. Here the sum comes first, and everything that the optimizer does (clipping, loss
scaling, weight decay, its slots) sees the same gradient on every replica that one device would have seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from understudy.trainer.trainer_errors import ModelError


def sum_before_applying(optimizer: keras.optimizers.Optimizer) -> None:
    """Make ``optimizer.apply`` add up the gradients of all replicas before it does anything else.

    Raises:
        ModelError: It is set up for something that TensorFlow cannot do on several replicas.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    _check_supported(inner)
    apply = optimizer.apply

    def apply_sum(grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        return apply(_sum_over_replicas(grads), trainable_variables)

    optimizer.apply = apply_sum
    # The place where Keras would add them up again.
    inner._all_reduce_sum_gradients = list  # noqa: SLF001 - Keras 2 had an argument for it, Keras 3 has none


def _sum_over_replicas(grads: Sequence[Any]) -> list[Any]:
    """Return the sums; None, which stands for a variable that the loss does not depend on, stays."""
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
