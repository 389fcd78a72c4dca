"""The room beside a full queue, for callers that have little waiting there."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

_QUEUE_TO_RESERVE: Final = 8
_FREE_TO_HELD: Final = 8
_NOTHING: Final = (0, 0)


class Reserve:
    """An eighth of a queue's size beside it, so that one caller that fills the queue leaves room to others.

    A caller may have an eighth of what stays free waiting here, so that even many callers that all want more leave
    some: the dynamic thresholds of shared packet buffers (Choudhury and Hahne, 1998, doi:10.1109/90.664262).

    Not thread-safe, but for `admits`, whose answer may be outdated on other threads.

    Args:
        max_queue_examples: The maximum number of examples in the queue.
        max_queue_bytes: The most bytes of their inputs.

    Attributes:
        examples: The number of examples that wait here.
        size: The bytes of their inputs.
    """

    def __init__(self, max_queue_examples: int, max_queue_bytes: int) -> None:
        self._max_examples = max_queue_examples // _QUEUE_TO_RESERVE
        self._max_bytes = max_queue_bytes // _QUEUE_TO_RESERVE
        self._held: dict[Hashable, tuple[int, int]] = {}
        self.examples = 0
        self.size = 0

    def admits(self, caller: Hashable, examples: int, size: int) -> bool:
        """Return whether a caller may add this many examples, with inputs of this many bytes."""
        held, held_size = self._held.get(caller, _NOTHING)
        free, free_size = self._max_examples - self.examples - examples, self._max_bytes - self.size - size
        return _FREE_TO_HELD * (held + examples) <= free and _FREE_TO_HELD * (held_size + size) <= free_size

    def add(self, caller: Hashable, examples: int, size: int) -> None:
        """Count a request that waits here from now on."""
        held, held_size = self._held.get(caller, _NOTHING)
        self._held[caller] = (held + examples, held_size + size)
        self.examples += examples
        self.size += size

    def remove(self, caller: Hashable, examples: int, size: int) -> None:
        """Count a request that does not wait here any more."""
        held, held_size = self._held.pop(caller, _NOTHING)
        if held > examples:
            self._held[caller] = (held - examples, held_size - size)
        self.examples -= examples
        self.size -= size
