"""Inspects the index of TensorFlow's variables, before TensorFlow allocates the tensors that it declares.

The index is a table of the format of LevelDB, not compressed, whose values are messages: one for each tensor, with its
type, its shape and where its data are (``tensorflow/core/util/tensor_bundle/tensor_bundle.h``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from understudy.checkpoints.inspection import bounds
from understudy.compat import data_type_name, parse_bundle_entry

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5


def inspect_bundle(prefix: Path) -> None:
    """Check that each tensor of a bundle is as large as its data.

    Args:
        prefix: The path of the index without its suffix.

    Raises:
        ValueError: The index is damaged, or a tensor declares more or fewer bytes than are stored.
    """
    index = prefix.with_name(f"{prefix.name}.index")
    if not index.exists():
        return
    stored = sum(path.stat().st_size for path in _data_files(prefix))
    total = 0
    for count, (name, value) in enumerate(_entries(index.read_bytes())):
        if count > bounds.MAX_OBJECTS:
            raise ValueError(f"its index lists more than {bounds.MAX_OBJECTS} tensors")
        if name:
            total += _check_tensor(name.decode(errors="replace"), value, stored)
    if total > bounds.largest_content(stored):
        raise ValueError(f"its tensors have {total} bytes, its data files {stored}")


def _data_files(prefix: Path) -> list[Path]:
    name = re.compile(re.escape(prefix.name) + r"\.data-\d{5,}-of-\d{5,}")
    return [path for path in prefix.parent.iterdir() if name.fullmatch(path.name)]


def _check_tensor(name: str, value: bytes, stored: int) -> int:
    """Return the number of bytes of a tensor's data."""
    entry = parse_bundle_entry(value)
    if entry.slices:  # the index lists the data of each slice separately
        return 0
    elements = math.prod(max(0, dimension.size) for dimension in entry.shape.dim)
    size = _ITEM_BYTES.get(data_type_name(entry.dtype))
    declared = elements if size is None else elements * size  # a string has at least its length, in one byte
    if entry.size > stored or (declared > entry.size if size is None else declared != entry.size):
        raise ValueError(f"tensor {name!r} declares {elements} elements in {entry.size} bytes, of {stored} stored")
    return int(entry.size)


_ITEM_BYTES = {
    "DT_BOOL": 1,
    "DT_INT8": 1,
    "DT_UINT8": 1,
    "DT_QINT8": 1,
    "DT_QUINT8": 1,
    "DT_FLOAT8_E5M2": 1,
    "DT_FLOAT8_E4M3FN": 1,
    "DT_INT16": 2,
    "DT_UINT16": 2,
    "DT_QINT16": 2,
    "DT_QUINT16": 2,
    "DT_HALF": 2,
    "DT_BFLOAT16": 2,
    "DT_INT32": 4,
    "DT_UINT32": 4,
    "DT_QINT32": 4,
    "DT_FLOAT": 4,
    "DT_INT64": 8,
    "DT_UINT64": 8,
    "DT_DOUBLE": 8,
    "DT_COMPLEX64": 8,
    "DT_COMPLEX128": 16,
}


def _entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table."""
    if len(table) < _FOOTER_BYTES or int.from_bytes(table[-8:], "little") != _MAGIC:
        raise ValueError("its index does not end as a table does")
    footer = table[-_FOOTER_BYTES:]
    position = _block_handle(footer, 0)[1]
    (offset, size), _ = _block_handle(footer, position)
    for _, handle in _block(table, offset, size):
        (offset, size), _ = _block_handle(handle, 0)
        yield from _block(table, offset, size)


def _block_handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    offset, position = _varint(data, position)
    size, position = _varint(data, position)
    return (offset, size), position


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    if offset + size + _TRAILER_BYTES > len(table) or size < 4:  # noqa: PLR2004 - the number of restarts
        raise ValueError("its index ends early")
    if table[offset + size]:
        raise ValueError("its index is compressed, which TensorFlow never does")
    block = table[offset : offset + size]
    end = size - 4 * (1 + int.from_bytes(block[-4:], "little"))
    position, key = 0, b""
    while position < end:
        shared, position = _varint(block, position)
        own, position = _varint(block, position)
        length, position = _varint(block, position)
        if shared > len(key) or position + own + length > end:
            raise ValueError("an entry of its index leads out of it")
        key = key[:shared] + block[position : position + own]
        yield key, block[position + own : position + own + length]
        position += own + length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the last byte
            return value, position
    raise ValueError("its index holds a number that does not end")
