"""Assigns weights that are stored as HDF5, in files or in archives, without blocking other threads.

Keras reads each variable through HDF5, and TensorFlow copies it while holding the GIL: 45 ms for a layer of 190 MB.
This module reads large variables directly from the file, in slices, into memory that TensorFlow uses without a copy.
It reuses the memory of released weights if possible.
"""

from __future__ import annotations

import functools
import io
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib  # Keras finds the variables of a model in a file with it

from understudy.checkpoints.low_priority import at_low_priority
from understudy.evaluator.model.spare_memory import ALIGNMENT_BYTES, SpareMemory

_SPARE = SpareMemory()
_SLICE_BYTES = 2**22
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
    with _Part(file, start, size) as part:
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


class _Part(io.RawIOBase):
    """A part of a file, as a file. Reads release the GIL."""

    def __init__(self, file: Path, start: int, size: int | None) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)
        self.name = str(file)
        self._start = start
        self._size = os.fstat(self._descriptor).st_size - start if size is None else size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or less at the end of the file."""
        into = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self.read_at(self._position, into)
        self._position += len(into)
        return len(into)

    def read_at(self, position: int, into: memoryview) -> None:
        """Fill a buffer from a position.

        Raises:
            EOFError: The file ends before the buffer is full.
        """
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptor, [into[done : done + _SLICE_BYTES]], self._start + position + done)
            if count == 0:
                raise EOFError(f"{self.name} ends early")
            done += count

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


class _Store(saving_lib.H5IOStore):
    """Keras's view of the weights, which returns large values as `TakenOver`."""

    def __init__(self, part: _Part) -> None:
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
