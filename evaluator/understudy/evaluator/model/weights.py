"""Assigns weights to variables: read from HDF5 without blocking other threads, and copied to GPUs once.

Keras reads each variable through HDF5, and TensorFlow copies it while holding the GIL: 45 ms for a layer of 190 MB.
This module reads large variables directly from the file, in slices, into memory that TensorFlow uses without a copy.
It reuses the memory of released weights if possible. TensorFlow also copies a value on the host to the device of each
replica, each time as a whole; here it is copied to the first GPU in pieces, and from there to the others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from understudy.checkpoints.file_part import FilePart
from understudy.checkpoints.low_priority import at_low_priority
from understudy.compat import h5_dataset, h5_store, layers_of, load_state, plain_variable
from understudy.devices.selection import canonical
from understudy.evaluator.types import Array

ALIGNMENT_BYTES = 64
"""The alignment that TensorFlow requires to use memory without a copy; borrowed memory starts at a page."""

_SMALL_BYTES = 2**16
_LARGE_BYTES = 2**22
PIECE_BYTES = 2**25
"""The maximum size of one copy from the host to a device."""

_HOST = "CPU:0"
_NOT_NUMBERS = {tf.string, tf.resource, tf.variant}
_IN_PIECES = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8}
"""The dtypes that can be assigned to a slice of a variable on a GPU. Large weights have one of them."""


class BufferPool:
    """Lends memory, and keeps released memory for the next request of the same size. Thread-safe.

    New memory is expensive, because the kernel clears it page by page. It is not allocated through NumPy, which
    requests huge pages: while the kernel compacts memory for them, threads that use the moved pages stall for 0.1 s or
    more. At most one block of each size is kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, mmap.mmap] = {}

    def borrow(self, size: int) -> Array:
        """Return this many uninitialized bytes; they are released when no array or tensor references them."""
        memory = self._kept.pop(size, None) or mmap.mmap(-1, size)
        lent = np.frombuffer(memory, np.uint8)  # views reference this array, not the underlying memory
        weakref.finalize(lent, self._kept.setdefault, size, memory).atexit = False
        return lent


_BUFFERS = BufferPool()


def assign_from_hdf5(model: Any, file: Path, *, start: int = 0, size: int | None = None) -> None:
    """Assign the weights in an HDF5 file that Keras wrote, or in a part of a file, to the variables of a model.

    Args:
        model: A Keras model that is built.
        file: The file that contains them.
        start: The offset of the HDF5 data in the file, in bytes.
        size: The size of the HDF5 data in bytes; None if it extends to the end of the file.

    Raises:
        ValueError: The weights do not fit the model, or it is not built. Some variables may have been assigned.
        OSError: The file cannot be read.
    """
    if not model.built:
        raise ValueError(f"the model {model.name} has no variables yet; build it, or call it on some data, first")
    with FilePart(file, start, size) as part:
        store = _Store(part)
        failures = load_state(model, store)
        store.close()
    if failures:
        layer, error = next(iter(failures.values()))
        raise ValueError(f"{getattr(layer, 'name', type(layer).__name__)}: {error}")


class ZeroCopyArray(np.ndarray[Any, Any]):
    """Values that become a tensor without a copy, and must not change afterwards."""

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """Return the tensor; see `tf.types.experimental.TensorProtocol`."""
        del name
        plain = self.view(np.ndarray)
        if self.ctypes.data % ALIGNMENT_BYTES or not self.flags.c_contiguous or not self.flags.writeable:
            return tf.constant(plain, dtype)
        tensor = tf.experimental.dlpack.from_dlpack(plain.__dlpack__())
        self.flags.writeable = False
        return tensor if dtype in {None, tensor.dtype} else tf.cast(tensor, dtype)


class _Store(h5_store()):  # type: ignore[misc] # a class of Keras
    """Keras's view of the weights, which returns large values as `ZeroCopyArray`."""

    def __init__(self, part: FilePart) -> None:
        self._part = part
        super().__init__(part.name, mode="r")

    def _get_h5_file(self, path_or_io: object, mode: str | None = None) -> h5py.File:
        del path_or_io, mode
        return h5py.File(self._part, "r")

    def __getitem__(self, key: str) -> Any:
        """Return the values of a variable."""
        dataset = h5_dataset(self._h5_entry_group, key)
        offset = dataset.id.get_offset()  # None unless it is stored contiguously and unfiltered
        is_plain = offset is not None and dataset.dtype.kind == "f" and dataset.dtype.isnative
        if not is_plain or dataset.nbytes <= _SMALL_BYTES:
            return super().__getitem__(key)
        values = _BUFFERS.borrow(dataset.nbytes).view(dataset.dtype).reshape(dataset.shape)
        read = functools.partial(self._part.read_at, offset, memoryview(values).cast("B"))
        at_low_priority(read) if values.nbytes > _LARGE_BYTES else read()
        return values.view(ZeroCopyArray)


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


class FrozenState:
    """The weights of layers that convert them when they are loaded.

    For example, `keras.layers.Normalization` computes plain tensors from its variables. A function that was traced
    before holds the earlier tensors.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [layer for layer in layers_of(model) if _converts_weights(layer)]
        self._digest = self._compute_digest()

    def changed(self) -> bool:
        """Whether the weights have changed since this object was created."""
        return self._digest != self._compute_digest()

    def _compute_digest(self) -> bytes:
        digest = hashlib.sha256()
        for layer in self._layers:
            for variable in layer.variables:
                digest.update(variable.numpy().tobytes())
        return digest.digest()


def _converts_weights(layer: Any) -> bool:
    kind = type(layer)
    loads_itself = kind.load_own_variables is not keras.Layer.load_own_variables
    return hasattr(layer, "finalize_state") or (loads_itself and not kind.__module__.startswith("keras."))
