"""Assigns weights that are stored as HDF5, in files or in archives, without blocking other threads.

Keras reads each variable through HDF5, and TensorFlow copies it while holding the GIL: 45 ms for a layer of 190 MB.
This module reads large variables directly from the file, in slices, into memory that TensorFlow uses without a copy.
It reuses the memory of released weights if possible.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib  # Keras finds the variables of a model in a file with it

from understudy.checkpoints.file_part import FilePart
from understudy.checkpoints.low_priority import at_low_priority
from understudy.evaluator.model.spare_memory import ALIGNMENT_BYTES, SpareMemory

_SPARE = SpareMemory()
_SMALL_BYTES = 2**16
_LARGE_BYTES = 2**22


def assign_weights(model: Any, file: Path, *, start: int = 0, size: int | None = None) -> None:
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
    failed: set[int] = set()
    reasons: dict[int, Any] = {}
    with FilePart(file, start, size) as part:
        store = _Store(part)
        saving_lib._load_state(  # noqa: SLF001 - `model.load_weights` calls it, but accepts only whole files
            model,
            weights_store=store,
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
            failed_saveables=failed,
            error_msgs=reasons,
        )
        store.close()
    if failed:
        layer, error = next(iter(reasons.values()))
        raise ValueError(f"{getattr(layer, 'name', type(layer).__name__)}: {error}")


class TakenOver(np.ndarray[Any, Any]):
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


class _Store(saving_lib.H5IOStore):
    """Keras's view of the weights, which returns large values as `TakenOver`."""

    def __init__(self, part: FilePart) -> None:
        self._part = part
        super().__init__(part.name, mode="r")

    def _get_h5_file(self, path_or_io: object, mode: str | None = None) -> h5py.File:
        del path_or_io, mode
        return h5py.File(self._part, "r")

    def __getitem__(self, key: str) -> Any:
        """Return the values of a variable."""
        dataset = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        offset = dataset.id.get_offset()  # None unless it is stored contiguously and unfiltered
        is_plain = offset is not None and dataset.dtype.kind == "f" and dataset.dtype.isnative
        if not is_plain or dataset.nbytes <= _SMALL_BYTES:
            return super().__getitem__(key)
        values = _SPARE.borrow(dataset.nbytes).view(dataset.dtype).reshape(dataset.shape)
        read = functools.partial(self._part.read_at, offset, memoryview(values).cast("B"))
        at_low_priority(read) if values.nbytes > _LARGE_BYTES else read()
        return values.view(TakenOver)
