"""Gives the memory of models that were dropped back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

from understudy.evaluator.compute.direct_call import give_back_kernels


def reclaim_memory() -> bool:
    """Free what dropped models held. Thread-safe; takes some milliseconds where `gc.freeze` was called after the start.

    A Keras model and a traced function are cycles of references, which only a garbage collection frees, and Python
    begins one of the oldest objects too seldom for models: they are few objects and much memory.

    Returns:
        Whether functions that are still used make their kernels anew at their next call; see `give_back_kernels`.
    """
    gc.collect()
    gave_back_kernels = give_back_kernels()
    if _trim is not None:
        _trim(0)
    return gave_back_kernels


def _find_trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's `malloc_trim`, or None where there is another allocator."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


_trim = _find_trim()
