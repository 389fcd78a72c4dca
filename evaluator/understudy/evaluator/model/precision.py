"""How GPUs multiply float32 numbers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from understudy.evaluator.settings import Precision


def set_precision(precision: Precision) -> None:
    """Switch TF32 on GPUs off (``exact``) or on (``fast``), for the whole process. TensorFlow's default is on."""
    tf.config.experimental.enable_tensor_float_32_execution(precision == "fast")


def precision_note(devices: Sequence[str]) -> str | None:
    """Return a note about numbers computed on these devices; None for CPUs, which have no TF32."""
    if not any("GPU" in device.upper() for device in devices):
        return None
    if tf.config.experimental.tensor_float_32_execution_enabled():
        return "precision is fast: GPUs round the factors of float32 products to 10 bits (TF32)"
    return "precision is exact: GPUs compute float32 products in float32, without TF32"
