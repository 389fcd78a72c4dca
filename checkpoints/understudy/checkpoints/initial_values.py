"""Builds models whose weights are loaded at once, without drawing random values for them first.

Drawing takes longer than loading, and several times the memory of the weights, which TensorFlow's allocator on CPUs
(of oneDNN) never gives back.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

_RANDOM: Final = (
    keras.initializers.Orthogonal,
    keras.initializers.RandomNormal,
    keras.initializers.RandomUniform,
    keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling,  # and its subclasses, of Glorot, He and LeCun
)
_MAPPED_BYTES: Final = 2**16
_MAPPABLE: Final = ("float16", "float32", "float64")

_ARE_LOADED: ContextVar[bool] = ContextVar("are_loaded", default=False)


@contextlib.contextmanager
def weights_are_loaded() -> Iterator[None]:
    """Within this context, Keras's random initializers without a seed return zeros, which take no memory.

    Enter it only to build a model whose variables are then all assigned. It holds for this thread.
    """
    _replace_initializers()
    token = _ARE_LOADED.set(True)
    try:
        yield
    finally:
        _ARE_LOADED.reset(token)


@functools.cache
def _replace_initializers() -> None:
    for kind in _RANDOM:
        kind.__call__ = _zeros_instead_of(kind.__call__)


def _zeros_instead_of(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def values(self: Any, shape: Sequence[int], dtype: Any = None) -> Any:
        if not _ARE_LOADED.get() or self.get_config().get("seed") is not None:
            return draw(self, shape, dtype)
        return _zeros(shape, keras.backend.standardize_dtype(dtype))

    return values


def _zeros(shape: Sequence[int], dtype: str) -> Any:
    """Return a tensor of zeros. The system provides the memory of a large one only when it is written to."""
    size = math.prod(shape) * tf.as_dtype(dtype).size
    if size <= _MAPPED_BYTES or dtype not in _MAPPABLE:
        return tf.zeros(shape, dtype)
    untouched = np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
    return tf.experimental.dlpack.from_dlpack(untouched.__dlpack__())
