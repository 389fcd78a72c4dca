"""Returns the memory of dropped models to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

from understudy.evaluator.model.direct_call import give_back_kernels


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
