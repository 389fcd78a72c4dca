"""Reads the content of an HDF5 file that may be damaged in any way. Also a program.

    python hdf5_contents.py weights|model PATH SECONDS

It prints the digest and the iteration count, or the damage, as JSON. A signal ends it after SECONDS of processor time,
because the HDF5 library can loop endlessly, or crash, on a damaged file. It imports nothing else of this project, so
that it starts fast.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# A LossScaleOptimizer counts in its inner optimizer; its own counter stays at 0.
OPTIMIZER_COUNTS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")

_LEGACY_OPTIMIZER = "optimizer_weights/"
_LEGACY_COUNTS = ("iteration", "iterations", "iter", "iteration:0", "iterations:0", "iter:0")
_MODEL = ("model_config", "training_config")
"""The attributes of a file that holds a whole model."""

_MACHINES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)
_DAMAGE = (OSError, RuntimeError, ValueError, LookupError, TypeError, MemoryError)
"""The exceptions that h5py raises for incomplete or damaged files."""


def first_count(file: Any, names: Sequence[str]) -> int | None:
    """Return the first scalar integer above 0 among these datasets of an open HDF5 file, or None."""
    for name in names:
        count = _as_count(file.get(name))
        if count:
            return count
    return None


def main(kind: str, path: Path, seconds: int) -> None:
    """Print the content of a file as JSON."""
    import h5py

    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with h5py.File(path, "r") as file:
            found = _read_model(file) if kind == "model" else _read(file, (), OPTIMIZER_COUNTS)
    except _DAMAGE as error:
        if _is_machines(error):
            raise
        found = {"damage": str(error) or type(error).__name__}
    print(json.dumps(found))  # noqa: T201 - the caller reads standard output


def _is_machines(error: Exception) -> bool:
    """Return whether the machine caused an error. A damaged file may request more memory than any machine has."""
    if isinstance(error, MemoryError):
        shape, dtype = (
            getattr(error, "shape", (0,)),
            getattr(error, "dtype", None),
        )  # NumPy's error holds the requested array
        wanted = math.prod(shape) * (dtype.itemsize if dtype is not None else 0)
        return wanted < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return isinstance(error, OSError) and error.errno in _MACHINES


def _read_model(file: Any) -> dict[str, Any]:
    if _MODEL[0] not in file.attrs:
        raise ValueError(
            f"it has no {_MODEL[0]}, so it does not hold a whole model; weights alone are read from *.weights.h5 files"
        )
    counts = [name for name in _names_in(file) if name.startswith(_LEGACY_OPTIMIZER) and _last(name) in _LEGACY_COUNTS]
    return _read(file, _MODEL, counts)


def _read(file: Any, attributes: Sequence[str], counts: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for name in attributes:
        digest.update(f"{name}={_text(file.attrs.get(name))}\n".encode())
    for line in _contents(file):
        digest.update(line)
    return {"digest": digest.hexdigest(), "iterations": first_count(file, counts)}


def _contents(file: Any) -> Iterator[bytes]:
    """Yield the name, type, shape and hash of every dataset; this reads the whole file."""
    import h5py

    found = False
    for name in sorted(_names_in(file)):
        item = file[name]
        if isinstance(item, h5py.Dataset):
            found = True
            value = item[()]
            content = value.tobytes() if item.dtype.kind != "O" else json.dumps(value, default=_text).encode()
            yield f"{name}:{item.dtype.str}:{item.shape}:{hashlib.sha256(content).hexdigest()}\n".encode()
    if not found:
        raise ValueError("it holds no weights")


def _names_in(file: Any) -> list[str]:
    names: list[str] = []
    file.visit(names.append)
    return names


def _as_count(dataset: Any) -> int | None:
    """Return a scalar integer dataset's value, or None for anything else."""
    if dataset is None or getattr(dataset, "shape", None) != () or dataset.dtype.kind not in "iu":
        return None
    return int(dataset[()])


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
