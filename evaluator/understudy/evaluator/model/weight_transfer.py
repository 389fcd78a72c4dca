"""Assigns values to mirrored variables on GPUs: once from the host, in pieces, and from the first GPU to the others.

TensorFlow copies a value on the host to the device of each replica, each time as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from understudy.compat import plain_variable
from understudy.devices.selection import canonical

PIECE_BYTES = 2**25
"""The maximum size of one copy from the host to a device."""

_HOST = "CPU:0"
_NOT_NUMBERS = {tf.string, tf.resource, tf.variant}
_IN_PIECES = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8}
"""The dtypes that can be assigned to a slice of a variable on a GPU. Large weights have one of them."""


@contextlib.contextmanager
def through_first_device(strategy: Any) -> Iterator[None]:
    """Within this context, a value on the host that is assigned to a mirrored variable is copied to one device only.

    It is copied to the first replica's device, in pieces of at most `PIECE_BYTES`, and from there to the others. The
    variables of a SavedModel, which TensorFlow restores itself, are not covered.

    Args:
        strategy: The `tf.distribute.MirroredStrategy` of the variables.
    """
    extended = strategy.extended
    device = extended.worker_devices[0]

    def update(variable: Any, function: Callable[..., Any], args: Sequence[Any] = (), **options: Any) -> Any:
        moved = tuple(_on_device(value, device) for value in args)
        return type(extended).update(extended, variable, function, args=moved, **options)

    extended.update = update  # every assignment to a mirrored variable calls it
    try:
        yield
    finally:
        vars(extended).pop("update", None)


def _on_device(value: Any, device: str) -> Any:
    """Return a tensor of numbers as one on this device; return other values unchanged."""
    if not isinstance(value, tf.Tensor) or tf.is_symbolic_tensor(value) or value.dtype in _NOT_NUMBERS:
        return value
    is_there = canonical(value.backing_device) == canonical(device)
    if not is_there and value.dtype in _IN_PIECES and value.shape.num_elements() * value.dtype.size > PIECE_BYTES:
        return _copied_in_pieces(value, device)
    with tf.device(device):
        return tf.identity(value)


def _copied_in_pieces(value: Any, device: str) -> Any:
    with tf.device(device):
        copy = plain_variable(tf.zeros([value.shape.num_elements()], value.dtype))
    with tf.device(_HOST):
        flat = tf.reshape(value, [-1])
    step = PIECE_BYTES // value.dtype.size
    for start in range(0, flat.shape[0], step):
        with tf.device(_HOST):
            piece = flat[start : start + step]
        with tf.device(device):
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=copy.handle, begin=[start], end=[start + piece.shape[0]], strides=[1], value=piece
            )
    with tf.device(device):
        return tf.reshape(copy.read_value(), value.shape)
