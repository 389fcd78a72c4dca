"""Use of XLA, which compiles a model's step if the model requests it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf
from keras.src.trainers.trainer import Trainer  # where Keras resolves ``jit_compile="auto"``

from understudy.trainer.trainer_errors import ModelError


@contextmanager
def off_by_default() -> Iterator[None]:
    """Make ``jit_compile="auto"``, the default of `keras.Model.compile`, mean False.

    In Keras it means True if there is one GPU. The numbers of a training, and whether its step compiles at all,
    would then depend on the machine. Not thread-safe.
    """
    resolve = Trainer._resolve_auto_jit_compile  # noqa: SLF001 - a compiled model no longer tells "auto" from True
    Trainer._resolve_auto_jit_compile = lambda _: False  # noqa: SLF001
    try:
        yield
    finally:
        Trainer._resolve_auto_jit_compile = resolve  # noqa: SLF001


def check_supported(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuse XLA where TensorFlow does not support it.

    Raises:
        ModelError: The model requests XLA under a strategy with several replicas or processes.
    """
    alone = strategy is tf.distribute.get_strategy() or isinstance(strategy, tf.distribute.OneDeviceStrategy)
    if model.jit_compile and not alone:
        raise ModelError(
            "the model is compiled with jit_compile=True, which TensorFlow cannot do under a strategy of several "
            "replicas (their gradients are added up within the step); leave it out, or train with strategy one_device",
        )
