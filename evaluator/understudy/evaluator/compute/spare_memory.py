"""Memory for one set of weights after another."""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from understudy.evaluator.types import Array

ALIGNMENT_BYTES = 64
"""What TensorFlow asks of memory that it takes over; what is lent begins with a page."""


class SpareMemory:
    """Lends memory, and keeps what nobody uses any more for the next who asks for as much. Thread-safe.

    Memory that is new costs: the kernel clears it, page by page. It is asked for as it comes, not by NumPy, which wants
    large pages: while the kernel moves others about to make some, it holds up whoever uses those, for 0.1 s and more.
    At most one piece of each size is kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, mmap.mmap] = {}

    def borrow(self, size: int) -> Array:
        """Return so many bytes, with anything in them; they come back when no array or tensor holds them any more."""
        memory = self._kept.pop(size, None) or mmap.mmap(-1, size)
        lent = np.frombuffer(memory, np.uint8)  # views of it hold it, not what lies beneath
        weakref.finalize(lent, self._kept.setdefault, size, memory).atexit = False
        return lent
