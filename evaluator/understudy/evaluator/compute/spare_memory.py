"""Memory for one set of weights after another."""

from __future__ import annotations

import weakref

import numpy as np

from understudy.evaluator.types import Array

ALIGNMENT_BYTES = 64
"""What TensorFlow asks of memory that it takes over."""


class SpareMemory:
    """Lends memory, and keeps what nobody uses any more for the next who asks for as much. Thread-safe.

    Memory that is new costs: the kernel clears it page by page, and may hold the process up while it looks for large
    pages. At most one piece of each size is kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Array] = {}

    def borrow(self, size: int) -> Array:
        """Return so many bytes, aligned, with anything in them; they come back when no array or tensor holds them."""
        memory = self._kept.pop(size, None)
        if memory is None:
            memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT_BYTES
        lent = np.frombuffer(memory.data[start : start + size], np.uint8)  # views of it hold it, not what lies beneath
        weakref.finalize(lent, self._kept.setdefault, size, memory).atexit = False
        return lent
