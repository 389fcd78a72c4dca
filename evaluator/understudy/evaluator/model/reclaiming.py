"""Frees the memory of dropped models, and the kernels of functions that were called as one operation."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import deque
from typing import Any

from understudy.compat import clear_kernels

_MAX_DROPPED = 16
_MAX_DROPPED_BYTES = 32 * 2**20

DROPPED_BYTES: deque[int] = deque()
"""The size of each deleted function that was called as one operation and whose kernels still exist, in bytes."""


def give_back_kernels() -> bool:
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
        Whether functions in use create their kernels again at their next call; see `give_back_kernels`.
    """
    gc.collect()
    gave_back_kernels = give_back_kernels()
    if _trim is not None:
        _trim(0)
    return gave_back_kernels


def _find_trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's `malloc_trim`, or None with another allocator."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


_trim = _find_trim()
