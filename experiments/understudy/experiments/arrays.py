"""Training data in arrays larger than memory: ``.npy`` files, or any object with the same indexing.

    def training_data(self):
        return array_examples((open_array("x-0.npy", "x-1.npy"), open_array("labels.npz", member="y")))

The trainer shuffles the whole arrays without reading ahead or buffering: it reads the entries of each batch.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from understudy.experiments.experiment_errors import ExperimentError

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member; ends with the lengths of its name and its extra field


class Array(Protocol):
    """The required interface of an array: indexing along axis 0 by several numbers at once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; axis 0 is the examples."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of each value."""

    def __getitem__(self, rows: npt.NDArray[np.int64], /) -> Any:
        """Return the entries with these numbers ``[n]``, in order, as an array ``[n, ...]``."""


@dataclass(frozen=True, kw_only=True)
class IndexedExamples:
    """Examples with random access by number.

    Attributes:
        size: Number of examples.
        element_spec: The spec of one example, ``(x, y)`` or ``(x, y, sample_weight)``, as of a dataset's element.
        fetch: Maps numbers, int64 ``[n]``, to those examples, each tensor ``[n, ...]``; used in a dataset's graph.
    """

    size: int
    element_spec: Any
    fetch: Callable[[tf.Tensor], Any]

    def dataset(self, *, rows_at_once: int = 256) -> tf.data.Dataset:
        """Return the examples in order, as for `Experiment.evaluation_data`."""
        numbers = tf.data.Dataset.range(self.size).batch(rows_at_once)
        examples = numbers.map(self.fetch, num_parallel_calls=tf.data.AUTOTUNE).unbatch()
        return examples.apply(tf.data.experimental.assert_cardinality(self.size))


def array_examples(arrays: Any) -> IndexedExamples:
    """Return examples made of the entries of arrays.

    Args:
        arrays: ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a dict, list or tuple of arrays: from
            `open_array` or NumPy, or any object with ``shape`` and ``dtype`` that is indexed by several numbers.

    Raises:
        ExperimentError: The arrays differ in length.
    """
    leaves: Sequence[Array] = tf.nest.flatten(arrays)
    sizes = {array.shape[0] for array in leaves}
    if len(sizes) != 1:
        raise ExperimentError(f"the arrays have {', '.join(map(str, sorted(sizes)))} rows; expected as many in each")
    specs = [tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)) for array in leaves]

    def read(numbers: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
        return [np.ascontiguousarray(array[numbers]) for array in leaves]

    def fetch(numbers: tf.Tensor) -> Any:
        values = tf.numpy_function(read, [numbers], [spec.dtype for spec in specs], stateful=False)
        for value, spec in zip(values, specs, strict=True):
            value.set_shape([*numbers.shape, *spec.shape])
        return tf.nest.pack_sequence_as(arrays, values)

    return IndexedExamples(size=sizes.pop(), element_spec=tf.nest.pack_sequence_as(arrays, specs), fetch=fetch)


def open_array(*paths: str | Path, member: str | None = None) -> Array:
    """Map ``.npy`` files, or an array in each of some ``.npz`` files, into memory, concatenated along axis 0.

    Data is read on access, and the operating system drops it again when it needs the memory.

    Args:
        paths: The files.
        member: The array's name, in ``.npz`` files.

    Raises:
        ExperimentError: A file is invalid or compressed, or the arrays do not fit together.
    """
    if not paths:
        raise ExperimentError("open_array() was given no file")
    parts = [_open(Path(path), member) for path in paths]
    kinds = {(part.dtype.str, part.shape[1:]) for part in parts}
    if len(kinds) > 1:
        found = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
        raise ExperimentError(f"the arrays of one open_array() have rows of {found}; expected the same in each file")
    return parts[0] if len(parts) == 1 else _Concatenated(parts)


class _Concatenated:
    """Arrays concatenated along axis 0."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(len(part) for part in parts)]
        self.shape = (self._starts[-1], *parts[0].shape[1:])
        self.dtype = parts[0].dtype

    def __getitem__(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        if rows.size and not 0 <= rows.min() <= rows.max() < self.shape[0]:
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {self.shape[0]}")
        values = np.empty((len(rows), *self.shape[1:]), self.dtype)
        where = np.searchsorted(self._starts, rows, side="right") - 1
        for index in np.unique(where):
            chosen = where == index
            values[chosen] = self._parts[index][rows[chosen] - self._starts[index]]
        return values


def _open(path: Path, member: str | None) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r") if member is None else _open_member(path, member)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ExperimentError(f"{path} cannot be opened as an array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ExperimentError(f"{path} is an .npz file; say which of its arrays with member=")
    if array.ndim == 0:
        raise ExperimentError(f"{path} holds a single value; expected rows")
    return array


def _open_member(path: Path, member: str) -> npt.NDArray[Any]:
    """Map an array at its position inside an ``.npz`` file, which is a zip file."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{member}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member} is compressed; write it with np.savez, not np.savez_compressed, or as .npy")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        file.seek(name_length + extra_length, 1)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
        return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape, order="F" if is_fortran else "C")
