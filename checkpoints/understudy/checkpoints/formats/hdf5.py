"""Inspects a private copy of an HDF5 file: ``.weights.h5``, or a whole model in the older Keras format.

HDF5 has no checksums. It has a superblock at the front, which the writer puts to disk last and which holds the address
of the file's end. A truncated or half-written file ends elsewhere. Other damage is found by reading the whole file in a
separate process.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Literal

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.formats import hdf5_contents
from understudy.checkpoints.formats.format import Content

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUPERBLOCK_BYTES = 64
_END_OFFSETS = {0: 40, 1: 44, 2: 28, 3: 28}
"""The offset of the end-of-file address in a superblock, by its version (HDF5 File Format Specification, II.A)."""

_START_SECONDS = 10
_BYTES_PER_SECOND = 10_000_000
"""The start and the slowest rate of a read, in processor time, before the file counts as damaged."""

_SLOWEST_SHARE = 0.1
"""The least share of a processor for a read. With less, it is ended, which says nothing about the file."""


def _inspect(kind: Literal["weights", "model"], path: Path) -> Content:
    """Inspect a file. Raises as `Format.inspect` does."""
    try:
        _check_end(path)
        return _read_apart(kind, path)
    except ValueError as error:
        suffix = ".weights.h5" if kind == "weights" else ".h5"
        raise DamagedCheckpointError(f"{path.name} is not a whole {suffix} file: {error}") from error


inspect_weights = partial(_inspect, "weights")
"""Inspects a ``.weights.h5`` file. Raises as `Format.inspect` does."""

inspect_model = partial(_inspect, "model")
"""Inspects an ``.h5`` file that holds a whole model. Raises as `Format.inspect` does."""


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


def _read_apart(kind: str, path: Path) -> Content:
    """Read a file in a separate process; raise ValueError if the file is damaged."""
    seconds = _START_SECONDS + path.stat().st_size // _BYTES_PER_SECOND
    program = [sys.executable, "-P", hdf5_contents.__file__, kind, str(path), str(seconds)]
    try:
        done = subprocess.run(
            program, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds / _SLOWEST_SHARE, check=False
        )
    except subprocess.TimeoutExpired as error:
        waited = f"the process that read it had less than {seconds} s of processor time in {error.timeout:g} s"
        raise TimeoutError(errno.ETIMEDOUT, waited, str(path)) from error
    if done.returncode == -signal.SIGKILL:  # sent only by an operator or the out-of-memory killer
        raise OSError(errno.ENOMEM, "the process that read it was killed, as happens when memory runs out", str(path))
    if done.returncode < 0:
        raise ValueError(f"reading it was ended by signal {-done.returncode} within {seconds} s of processor time")
    if done.returncode > 0:
        raise OSError(f"{path} could not be read: {done.stderr.decode(errors='replace').strip()[-500:]}")
    found = json.loads(done.stdout)
    if "damage" in found:
        raise ValueError(found["damage"])
    return Content(digest=str(found["digest"]), iterations=found["iterations"])
