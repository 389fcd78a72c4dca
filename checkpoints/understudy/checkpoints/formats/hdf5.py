"""Looking into a private copy of an HDF5 file: ``.weights.h5``, and the whole models that older Keras wrote.

HDF5 has no checksums. What it has is a superblock at its front, which a writer puts to disk last, when everything else
is there; it says where the file ends. A file that was cut off, or is half written, ends elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from understudy.checkpoints.errors import DamagedCheckpointError
from understudy.checkpoints.formats.format import Content

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUPERBLOCK_BYTES = 64
_END_OFFSETS = {0: 40, 1: 44, 2: 28, 3: 28}
"""Where a superblock keeps the address of the file's end, by its version (HDF5 File Format Specification, II.A)."""

# A LossScaleOptimizer counts in the optimizer that it wraps; its own counter stays at 0.
OPTIMIZER_COUNTS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")

_LEGACY_OPTIMIZER = "optimizer_weights/"
_LEGACY_COUNTS = ("iteration", "iterations", "iter", "iteration:0", "iterations:0", "iter:0")

_DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError)
"""What h5py raises on files that are not whole, besides what this module raises itself."""


def inspect_weights(path: Path) -> Content:
    """Look into a ``.weights.h5`` file. Raises as `Format.inspect` does."""

    def read_count(file: Any) -> int | None:
        return first_count(file, OPTIMIZER_COUNTS)

    return _inspect(path, what=".weights.h5", read_count=read_count, attributes=())


def inspect_model(path: Path) -> Content:
    """Look into an ``.h5`` file that holds a whole model. Raises as `Format.inspect` does."""

    def read_count(file: Any) -> int | None:
        names: list[str] = []
        file.visit(names.append)
        counts = (name for name in names if name.startswith(_LEGACY_OPTIMIZER) and _last(name) in _LEGACY_COUNTS)
        return first_count(file, tuple(counts))

    return _inspect(path, what=".h5", read_count=read_count, attributes=("model_config", "training_config"))


def first_count(file: Any, names: tuple[str, ...]) -> int | None:
    """Return the first scalar integer above 0 among these datasets of an open HDF5 file, or None."""
    for name in names:
        count = _as_count(file.get(name))
        if count:
            return count
    return None


def _inspect(path: Path, *, what: str, read_count: Callable[[Any], int | None], attributes: tuple[str, ...]) -> Content:
    import h5py

    with _damage_to(path, what):
        _check_end(path)
        with h5py.File(path, "r") as file:
            if attributes and attributes[0] not in file.attrs:
                raise ValueError(
                    f"it has no {attributes[0]}, so it does not hold a whole model; weights alone are read from "
                    "*.weights.h5 files"
                )
            digest = hashlib.sha256()
            for name in attributes:
                digest.update(f"{name}={_text(file.attrs.get(name))}\n".encode())
            for line in _contents(file):
                digest.update(line)
            return Content(digest=digest.hexdigest(), iterations=read_count(file))


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


def _contents(file: Any) -> Iterator[bytes]:
    """Give the name, type, shape and hash of every dataset, which also reads all of it."""
    import h5py

    names: list[str] = []
    file.visit(names.append)
    found = False
    for name in sorted(names):
        item = file[name]
        if isinstance(item, h5py.Dataset):
            found = True
            value = item[()]
            content = value.tobytes() if item.dtype.kind != "O" else json.dumps(value, default=_text).encode()
            yield f"{name}:{item.dtype.str}:{item.shape}:{hashlib.sha256(content).hexdigest()}\n".encode()
    if not found:
        raise ValueError("it holds no weights")


@contextlib.contextmanager
def _damage_to(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except _DAMAGE as error:
        raise DamagedCheckpointError(f"{path.name} is not a whole {what} file: {error}") from error


def _as_count(dataset: Any) -> int | None:
    """Return a scalar integer dataset's value, or None for anything else."""
    if dataset is None or getattr(dataset, "shape", None) != () or dataset.dtype.kind not in "iu":
        return None
    return int(dataset[()])


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
