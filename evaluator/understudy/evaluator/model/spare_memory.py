"""Reuses memory for the weights of one checkpoint after another."""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from understudy.evaluator.types import Array

ALIGNMENT_BYTES = 64
"""The alignment that TensorFlow requires to use memory without a copy; borrowed memory starts at a page."""


class SpareMemory:
    """Lends memory, and keeps released memory for the next request of the same size. Thread-safe.

    New memory is expensive, because the kernel clears it page by page. It is not allocated through NumPy, which
    requests huge pages: while the kernel compacts memory for them, threads that use the moved pages stall for 0.1 s or
    more. At most one block of each size is kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, mmap.mmap] = {}

    def borrow(self, size: int) -> Array:
        """Return this many uninitialized bytes; they are released when no array or tensor references them."""
        memory = self._kept.pop(size, None) or mmap.mmap(-1, size)
        lent = np.frombuffer(memory, np.uint8)  # views reference this array, not the underlying memory
        weakref.finalize(lent, self._kept.setdefault, size, memory).atexit = False
        return lent
