"""Inspects a private copy of TensorFlow's variables: an index, and data with a checksum for every tensor."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from understudy.checkpoints.formats.format import Content

INDEX_SUFFIX = ".index"

_NO_PART_OF_THE_MODEL = re.compile(r"_CHECKPOINTABLE_OBJECT_GRAPH|save_counter/.*")
_COUNT = re.compile(r"(?:.*/)?(?:_iterations|iter)/\.ATTRIBUTES/VARIABLE_VALUE")


def bundle_files(prefix: Path) -> list[Path]:
    """Return the files of a bundle, whose names start with ``prefix``.

    Raises:
        FileNotFoundError: There is no index, or no data.
    """
    index = prefix.with_name(prefix.name + INDEX_SUFFIX)
    data = re.compile(re.escape(prefix.name) + r"\.data-\d{5,}-of-\d{5,}")
    found = sorted(path for path in prefix.parent.iterdir() if data.fullmatch(path.name))
    if not found or not index.exists():
        raise FileNotFoundError(f"{prefix} has no index or no data")
    return [index, *found]


def read_bundle(prefix: Path, *extra: str) -> Content:
    """Read every tensor of a bundle; this checks its checksums.

    Args:
        prefix: The path of the index without its suffix.
        extra: Further content that the digest covers.

    Raises:
        ValueError: It is incomplete or damaged.
    """
    import tensorflow as tf

    digest = hashlib.sha256("\n".join(extra).encode())
    count = 0
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        for name in sorted(reader.get_variable_to_shape_map()):
            tensor = reader.get_tensor(name)
            if not _NO_PART_OF_THE_MODEL.fullmatch(name):
                digest.update(f"\n{name}:".encode() + _fingerprint(tensor))
            if _COUNT.fullmatch(name) and tensor.ndim == 0:
                count = max(count, int(tensor))
    except (tf.errors.OpError, RuntimeError, LookupError) as error:
        raise ValueError(str(error).strip().splitlines()[0]) from error
    return Content(digest=digest.hexdigest(), iterations=count or None)


def _fingerprint(tensor: Any) -> bytes:
    """Return the type, shape and hash of a value from a reader: an array, or the bytes of a scalar string."""
    if isinstance(tensor, bytes):
        return hashlib.sha256(tensor).digest()
    content = tensor.tobytes() if tensor.dtype.kind != "O" else _joined(tensor.ravel())
    return f"{tensor.dtype.str}:{tensor.shape}:".encode() + hashlib.sha256(content).digest()


def _joined(values: Iterable[bytes]) -> bytes:
    return b"".join(len(value).to_bytes(8, "little") + value for value in values)
