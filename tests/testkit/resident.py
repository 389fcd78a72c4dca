"""The resident memory of this process, and memory that the allocator keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import psutil

_BLOCK_BYTES = 16_384
"""Small enough for the allocator's heap, and too large for Python's own."""
_SHARE = 512
_MEBIBYTE = 2**20


def resident_mib() -> float:
    """Return the resident memory of this process."""
    return float(psutil.Process().memory_info().rss) / _MEBIBYTE


def peak_mib(during: Callable[[], object]) -> float:
    """Return by how much the resident memory of this process grows at most while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size (proc_pid_clear_refs(5))
    before = resident_mib()
    during()
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak) / 1024 - before


def freed_between_others(mebibytes: int, meanwhile: Callable[[], None] = lambda: None) -> list[bytes]:
    """Allocate so much memory in small blocks and free nearly all; return the blocks that remain, the last one too.

    ``meanwhile`` is called while all blocks are in use.
    """
    blocks = [b"x" * _BLOCK_BYTES for _ in range(mebibytes * _MEBIBYTE // _BLOCK_BYTES)]
    meanwhile()
    return [*blocks[::_SHARE], blocks[-1]]
