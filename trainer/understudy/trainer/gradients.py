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

PACK_BYTES = 2**25
"""The maximum size of gradients that are added up together."""


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
    sums: list[Any] = [None] * len(grads)
    for pack in packs(grads):
        reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, [grads[place] for place in pack])
        for place, total in zip(pack, reduced, strict=True):
            sums[place] = total
    return sums


def packs(grads: Sequence[Any]) -> list[list[int]]:
    """Return the places of the gradients that are added up together.

    TensorFlow copies the gradients of one reduction into one tensor, once the last of them is computed. A pack holds at
    most `PACK_BYTES`, or one larger gradient, of one dtype. The packs of the last layers, whose gradients are computed
    first, come first. All tasks of a cluster get the same packs.

    Args:
        grads: Tensors, `tf.IndexedSlices`, which count as empty because they are never joined, and None.
    """
    closed: list[list[int]] = []
    filling: dict[tf.DType, tuple[list[int], int]] = {}
    for place, grad in reversed([*enumerate(grads)]):
        if grad is None:
            continue
        size = 0 if isinstance(grad, tf.IndexedSlices) else (grad.shape.num_elements() or 0) * grad.dtype.size
        pack, filled = filling.get(grad.dtype, ([], 0))
        if pack and filled + size > PACK_BYTES:
            closed.append(pack)
            pack, filled = [], 0
        filling[grad.dtype] = [place, *pack], filled + size
    return [*closed, *(pack for pack, _ in filling.values())]


def _check_supported(optimizer: keras.optimizers.Optimizer) -> None:
    for setting in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(optimizer, setting, None):
            raise ModelError(
                f"the optimizer sets {setting}, which TensorFlow cannot do on several replicas (it updates variables "
                "under a condition); leave it out, or train with strategy one_device",
            )
