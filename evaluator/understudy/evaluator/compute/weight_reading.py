"""Reads weights from HDF5 files without holding everybody else up.

Importing this module teaches TensorFlow how to make tensors of HDF5 datasets, which is what Keras assigns to variables
when it loads weights. By itself TensorFlow would copy each as a whole, and keep Python's other threads waiting for it:
45 ms for a layer of 190 MB.
"""

from __future__ import annotations

import math
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from understudy.evaluator.types import Array

_ALIGNMENT_BYTES = 64
"""What TensorFlow asks of a buffer that it takes over."""
_SLICE_BYTES = 2**20
_SMALL_BYTES = 2**16


def to_tensor(dataset: h5py.Dataset) -> Any:
    """Return the values of a dataset as a tensor that holds the only copy of them."""
    if dataset.dtype.kind != "f" or dataset.nbytes <= _SMALL_BYTES:
        return tf.constant(dataset[()])
    return tf.experimental.dlpack.from_dlpack(read_in_slices(dataset).__dlpack__())


def read_in_slices(dataset: h5py.Dataset) -> Array:
    """Return the values of a dataset that has an axis at least, aligned as TensorFlow wants it."""
    values = _aligned(dataset.shape, dataset.dtype)
    rows = max(1, _SLICE_BYTES * len(dataset) // max(1, dataset.nbytes))
    for start in range(0, len(dataset), rows):
        part = np.s_[start : min(start + rows, len(dataset))]
        dataset.read_direct(values, part, part)
    return values


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[start : start + size].view(dtype).reshape(shape)


def _convert(value: h5py.Dataset, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> Any:  # noqa: FBT001, FBT002 - TensorFlow's
    del name, as_ref
    tensor = to_tensor(value)
    return tensor if dtype in {None, tensor.dtype} else tf.cast(tensor, dtype)


tf.register_tensor_conversion_function(h5py.Dataset, _convert)
