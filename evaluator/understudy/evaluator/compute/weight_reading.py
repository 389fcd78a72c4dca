"""Assigns weights that are stored as HDF5, in files or in archives, without holding everybody else up.

Keras would read each variable through HDF5, and have TensorFlow copy it while Python's other threads wait: 45 ms for a
layer of 190 MB. Here what is large is read straight from the file, in slices, into memory that TensorFlow takes over,
if possible the memory of weights that nobody uses any more.
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
from keras.src.saving import saving_lib  # how Keras itself finds the variables of a model in a file

from understudy.checkpoints.low_priority import at_low_priority
from understudy.evaluator.compute.spare_memory import ALIGNMENT_BYTES, SpareMemory

_SPARE = SpareMemory()
_SLICE_BYTES = 2**22
_SMALL_BYTES = 2**16
_LARGE_BYTES = 2**22


def assign_weights(model: Any, file: Path, *, start: int = 0, size: int | None = None) -> None:
    """Assign the weights in an HDF5 file that Keras wrote, or in a part of a file, to the variables of a model.

    Args:
        model: A Keras model that is built.
        file: Where they are.
        start: Where in that the HDF5 file begins, in bytes.
        size: How many bytes it has; None where it goes to the end.

    Raises:
        ValueError: They are not those of the model, some of which may have been assigned; or it is not built.
        OSError: The file cannot be read.
    """
    if not model.built:
        raise ValueError(f"the model {model.name} has no variables yet; build it, or call it on some data, first")
    failed: set[int] = set()
    reasons: dict[int, Any] = {}
    with _Part(file, start, size) as part:
        store = _Store(part)
        saving_lib._load_state(  # noqa: SLF001 - what `model.load_weights` calls, which takes whole files only
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
    """Values that become a tensor without being copied, and must not be changed from then on."""

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
    """A part of a file, as a file. Reading it leaves Python's other threads alone."""

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
        """Fill the buffer, or as much of it as there is."""
        into = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self.read_at(self._position, into)
        self._position += len(into)
        return len(into)

    def read_at(self, position: int, into: memoryview) -> None:
        """Fill a buffer with what is at a position.

        Raises:
            EOFError: There is not so much.
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
    """Keras' view of the weights, which gives what is large as `TakenOver`."""

    def __init__(self, part: _Part) -> None:
        self._part = part
        super().__init__(part.name, mode="r")

    def _get_h5_file(self, path_or_io: object, mode: str | None = None) -> h5py.File:
        del path_or_io, mode
        return h5py.File(self._part, "r")

    def __getitem__(self, key: str) -> Any:
        """Return the values of a variable."""
        dataset = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        offset = dataset.id.get_offset()  # None unless it is stored in one piece and as it is
        is_plain = offset is not None and dataset.dtype.kind == "f" and dataset.dtype.isnative
        if not is_plain or dataset.nbytes <= _SMALL_BYTES:
            return super().__getitem__(key)
        values = _SPARE.borrow(dataset.nbytes).view(dataset.dtype).reshape(dataset.shape)
        read = functools.partial(self._part.read_at, offset, memoryview(values).cast("B"))
        at_low_priority(read) if values.nbytes > _LARGE_BYTES else read()
        return values.view(TakenOver)
