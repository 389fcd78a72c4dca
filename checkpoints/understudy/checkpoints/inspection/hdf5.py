"""Inspects HDF5 files: ``.weights.h5``, whole models in the older Keras format, and the weights in ``.keras`` files.

A file of HDF5 may refer to other files by links, by datasets stored elsewhere, and by datasets put together from
others. Keras writes none of these. Its datasets may declare more than is stored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py

from understudy.checkpoints.inspection import bounds

# A LossScaleOptimizer counts in its inner optimizer; its own counter stays at 0.
OPTIMIZER_COUNTS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")

_LEGACY_OPTIMIZER = "optimizer_weights/"
_LEGACY_COUNTS = ("iteration", "iterations", "iter", "iteration:0", "iterations:0", "iter:0")
_MODEL = ("model_config", "training_config")
"""The attributes of a file that holds a whole model."""

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUPERBLOCK_BYTES = 64
_END_OFFSETS = {0: 40, 1: 44, 2: 28, 3: 28}
"""The offset of the end-of-file address in a superblock, by its version (HDF5 File Format Specification, II.A)."""

_SLAB_BYTES = 2**24
_FILTERS = frozenset(
    {
        h5py.h5z.FILTER_DEFLATE,
        h5py.h5z.FILTER_SHUFFLE,
        h5py.h5z.FILTER_FLETCHER32,
        h5py.h5z.FILTER_SZIP,
        h5py.h5z.FILTER_NBIT,
        h5py.h5z.FILTER_SCALEOFFSET,
        h5py.h5z.FILTER_LZF,
    }
)


def inspect_hdf5(path: Path, *, whole_model: bool, content: bool) -> dict[str, Any]:
    """Check a file, and with ``content`` read it all: its digest, and the number of its optimizer's steps.

    Raises:
        ValueError: It is damaged, exceeds a bound, or refers to other files.
        Exception: Whatever h5py raises for a damaged file.
    """
    _check_end(path)
    with h5py.File(path, "r") as file:
        check_file(file, path.stat().st_size)
        if whole_model:
            _check_model(file)
        if not content:
            return {"digest": None, "iterations": None}
        if not whole_model:
            return _read(file, (), OPTIMIZER_COUNTS)
        names = (name for name in _names_in(file) if name.startswith(_LEGACY_OPTIMIZER))
        return _read(file, _MODEL, [name for name in names if name.rpartition("/")[2] in _LEGACY_COUNTS])


def open_file(source: Any, name: str) -> h5py.File:
    """Open a file object; raise ValueError if it is not HDF5."""
    try:
        return h5py.File(source, "r")
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error


def check_file(file: h5py.File, file_bytes: int) -> None:
    """Check that a file is self-contained, and that what it declares is in proportion to its size.

    Raises:
        ValueError: The text names the dataset, the link or the attribute.
    """
    _check_links(file)
    check = _SizeCheck(bounds.largest_content(file_bytes))
    check.attributes_of(file)
    file.visititems(check.visit)


def first_count(file: h5py.File, names: Sequence[str]) -> int | None:
    """Return the first scalar integer above 0 among these datasets of an open HDF5 file, or None."""
    for name in names:
        count = _as_count(file.get(name))
        if count:
            return count
    return None


def _check_end(path: Path) -> None:
    """Raise ValueError unless the file ends where its superblock says."""
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK_BYTES)
    if len(head) < _SUPERBLOCK_BYTES or not head.startswith(_SIGNATURE):
        raise ValueError("it does not begin as HDF5 does")
    offset = _END_OFFSETS.get(head[len(_SIGNATURE)])
    if offset is None:
        raise ValueError(f"its superblock has version {head[len(_SIGNATURE)]}; known are {sorted(_END_OFFSETS)}")
    end, size = int.from_bytes(head[offset : offset + 8], "little"), path.stat().st_size
    if end != size:
        raise ValueError(f"it ends at byte {size}, its superblock says {end}")


def _check_links(file: h5py.File) -> None:
    """Raise ValueError for a link that leads elsewhere. HDF5's visitor takes no exception, only an end."""
    count = 0

    def visit(name: bytes, link: Any) -> str | None:
        nonlocal count
        count += 1
        if count > bounds.MAX_OBJECTS:
            return f"it holds more than {bounds.MAX_OBJECTS} objects"
        if link.type != h5py.h5l.TYPE_HARD:
            kind = "to another file" if link.type == h5py.h5l.TYPE_EXTERNAL else "that Keras never writes"
            return f"{_text(name)!r} is a link {kind}"
        return None

    problem = file.id.links.visit(visit, info=True)
    if problem is not None:
        raise ValueError(problem)


class _SizeCheck:
    """Adds up what the objects of a file declare."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._total = 0

    def visit(self, name: str, item: Any) -> None:
        """Check an object with its attributes. Raises ValueError."""
        if isinstance(item, h5py.Dataset):
            self._dataset(name, item)
        self.attributes_of(item)

    def attributes_of(self, item: Any) -> None:
        """Check the attributes of an object. Raises ValueError."""
        if not h5py.h5a.get_num_attrs(item.id):
            return
        for name in item.attrs:
            attribute = item.attrs.get_id(name)
            self._add(f"attribute {name!r}", math.prod(attribute.shape) * attribute.dtype.itemsize)
            if attribute.dtype.kind == "O":
                self._add(f"attribute {name!r}", _size_of(item.attrs[name]))

    def _dataset(self, name: str, dataset: h5py.Dataset) -> None:
        creation = dataset.id.get_create_plist()
        if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count():
            raise ValueError(f"dataset {name!r} is stored in other files")
        for index in range(creation.get_nfilters()):
            if creation.get_filter(index)[0] not in _FILTERS:
                raise ValueError(f"dataset {name!r} is compressed by filter {creation.get_filter(index)[0]}")
        dtype = dataset.dtype
        if dataset.chunks is not None:
            self._check(f"a chunk of dataset {name!r}", math.prod(dataset.chunks) * dtype.itemsize)
        self._add(f"dataset {name!r}", math.prod(dataset.shape or ()) * dtype.itemsize)
        if dtype.kind == "O":
            for slab in _slabs(dataset):
                self._add(f"dataset {name!r}", _size_of(slab))

    def _add(self, what: str, size: int) -> None:
        self._total += size
        self._check(what, self._total)

    def _check(self, what: str, size: int) -> None:
        if size > self._limit:
            raise ValueError(f"{what} would take it to {size} bytes; at most {self._limit} were expected")


def _size_of(value: Any) -> int:
    """Return the bytes of strings or sequences of variable length, which may share what is stored."""
    if isinstance(value, str | bytes):
        return len(value)
    if hasattr(value, "dtype") and value.dtype.kind != "O":
        return int(value.nbytes)
    return sum(_size_of(element) for element in value.flat) if hasattr(value, "flat") else 0


def _check_model(file: h5py.File) -> None:
    if _MODEL[0] not in file.attrs:
        raise ValueError(
            f"it has no {_MODEL[0]}, so it does not hold a whole model; weights alone are read from *.weights.h5 files"
        )
    for name in _MODEL:
        config = file.attrs.get(name, "{}")
        if not isinstance(config, str | bytes):
            raise ValueError(f"{name} is not a text")  # noqa: TRY004 - the file is damaged
        bounds.parse_json(config.encode() if isinstance(config, str) else config, name)


def _read(file: h5py.File, attributes: Sequence[str], counts: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for name in attributes:
        digest.update(f"{name}={_text(file.attrs.get(name))}\n".encode())
    for line in _contents(file):
        digest.update(line)
    return {"digest": digest.hexdigest(), "iterations": first_count(file, counts)}


def _contents(file: h5py.File) -> Iterator[bytes]:
    """Yield the name, type, shape and hash of every dataset; this reads the whole file."""
    found = False
    for name in sorted(_names_in(file)):
        item = file[name]
        if isinstance(item, h5py.Dataset):
            found = True
            yield f"{name}:{item.dtype.str}:{item.shape}:{_hash(item)}\n".encode()
    if not found:
        raise ValueError("it holds no weights")


def _hash(dataset: h5py.Dataset) -> str:
    if dataset.dtype.kind == "O":
        return hashlib.sha256(json.dumps(dataset[()], default=_text).encode()).hexdigest()
    digest = hashlib.sha256()
    for slab in _slabs(dataset):
        digest.update(slab.tobytes())
    return digest.hexdigest()


def _slabs(dataset: h5py.Dataset) -> Iterator[Any]:
    """Yield a dataset in pieces along its first axis, so that reading needs little memory."""
    if not dataset.shape:
        yield dataset[()]
        return
    row = max(1, math.prod(dataset.shape[1:]) * dataset.dtype.itemsize)
    step = max(1, _SLAB_BYTES // row)
    if dataset.chunks is not None:
        step = -(-step // dataset.chunks[0]) * dataset.chunks[0]
    for start in range(0, dataset.shape[0], step):
        yield dataset[start : start + step]


def _names_in(file: h5py.File) -> list[str]:
    names: list[str] = []
    file.visit(names.append)
    return names


def _as_count(dataset: Any) -> int | None:
    """Return a scalar integer dataset's value, or None for anything else."""
    if dataset is None or getattr(dataset, "shape", None) != () or dataset.dtype.kind not in "iu":
        return None
    return int(dataset[()])


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
