"""Frees the memory of dropped models and of answered requests, and kernels of functions called as one operation."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections import deque
from pathlib import Path
from typing import Any

from understudy.compat import clear_kernels

_MAX_DROPPED = 16
_MAX_DROPPED_BYTES = 32 * 2**20

DROPPED_BYTES: deque[int] = deque()
"""The size of each deleted function that was called as one operation and whose kernels still exist, in bytes."""


def release_kernels() -> bool:
    """Free the kernels of deleted functions, once there are many or they are large. Thread-safe.

    Returns:
        Whether kernels were freed. Then the next call of every other function creates its kernels again, which takes
        30 ms or more; make these calls before the next request.
    """
    if len(DROPPED_BYTES) < _MAX_DROPPED and sum(tuple(DROPPED_BYTES)) < _MAX_DROPPED_BYTES:
        return False
    DROPPED_BYTES.clear()
    clear_kernels()
    return True


def size_of(function: Any) -> tuple[int, int]:
    """Return the number of operations of a function, and its size in bytes, constants included."""
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function), graph.ByteSize()


def reclaim_memory() -> bool:
    """Free the memory of dropped models. Thread-safe; takes milliseconds if `gc.freeze` was called after the start.

    A Keras model and a traced function are reference cycles, which only a garbage collection frees. Python collects the
    oldest generation too seldom for models, which are few objects with much memory.

    Returns:
        Whether functions in use create their kernels again at their next call; see `release_kernels`.
    """
    gc.collect()
    released_kernels = release_kernels()
    if _trim is not None:
        _trim(0)
    return released_kernels


class MemoryTrimmer:
    """Gives memory that was freed back to the system. For one thread at a time.

    glibc keeps most of what is freed between parts in use: 80 unfinished requests of 1 MiB left 110 MiB in its heaps. A
    trim takes 5 to 20 ms, during which allocations may wait, so one is made only after the process has grown. What was
    still in use then may be freed later, so further trims follow, each after twice as many looks as the one before.
    """

    def __init__(self) -> None:
        self._least_bytes = self._settled_bytes = _resident_bytes()
        self._looks = self._pause = 0

    def trim_if_grown(self) -> None:
        """Trim if the process has grown by `GROWTH_BYTES` since the last trim; when due, since it was smallest."""
        resident = _resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        self._settled_bytes = min(self._settled_bytes, resident)
        self._looks += 1
        if resident > self._settled_bytes + GROWTH_BYTES:
            self._trim(next_pause=1)
        elif resident > self._least_bytes + GROWTH_BYTES and self._looks >= self._pause:
            self._trim(next_pause=2 * self._pause)

    def _trim(self, *, next_pause: int) -> None:
        if _trim is not None:
            _trim(0)
        self._settled_bytes = _resident_bytes()
        self._looks, self._pause = 0, next_pause


GROWTH_BYTES = 16 * 2**20
_STATUS = Path("/proc/self/statm")


def _resident_bytes() -> int:
    """Return the memory of this process; 0 where it is not known."""
    try:
        return int(_STATUS.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _find_trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's `malloc_trim`, or None with another allocator."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


_trim = _find_trim()
