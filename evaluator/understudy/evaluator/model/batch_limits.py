"""Remembers the batch sizes that did not fit in memory."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from understudy.evaluator.evaluator_errors import OutOfResourcesError
from understudy.evaluator.library_errors import first_line

Shapes = tuple[tuple[int, ...], ...]
"""The shape of one example of each input."""

_MAX_SHAPES = 64

_log = logging.getLogger(__name__)


class BatchLimits:
    """The maximum number of examples of a call, by the shapes of an example. Thread-safe.

    A limit that was lowered for some shapes applies to them and to shapes that are at least as large along every axis,
    so that one caller's long sequences do not split another caller's batches. At most 64 shapes are remembered; the
    oldest is forgotten first.

    Args:
        most: The maximum for shapes that fit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lowered: OrderedDict[Shapes, int] = OrderedDict()
        self._lock = threading.Lock()

    def limit(self, inputs: Sequence[Any]) -> int:
        """Return the maximum for a batch of these inputs, ``[examples, ...]`` each."""
        if not self._lowered:
            return self._most
        shapes = _shapes(inputs)
        with self._lock:
            return min((limit for known, limit in self._lowered.items() if _covers(known, shapes)), default=self._most)

    def lower(self, inputs: Sequence[Any], examples: int, limit: int, error: Exception) -> None:
        """Lower the maximum after a call did not fit in memory.

        Args:
            inputs: The inputs of the batch, ``[examples, ...]`` each.
            examples: The number of examples of the call that failed.
            limit: The maximum from now on; 0 if a single example did not fit.
            error: Its error.

        Raises:
            OutOfResourcesError: A single example does not fit.
        """
        if limit < 1:
            raise OutOfResourcesError(f"there is no memory for a single example: {first_line(error)}") from error
        shapes = _shapes(inputs)
        with self._lock:
            self._lowered.pop(shapes, None)
            self._lowered[shapes] = limit
            if len(self._lowered) > _MAX_SHAPES:
                self._lowered.popitem(last=False)
        _log.warning(
            "out of memory, going on with smaller batches of these shapes",
            extra={"shapes": shapes, "examples": examples, "max_batch_size": limit},
        )

    def restore(self) -> bool:
        """Forget all lowered limits, because memory may be available again; return whether there were any."""
        with self._lock:
            lowered = bool(self._lowered)
            self._lowered.clear()
            return lowered


def _shapes(inputs: Sequence[Any]) -> Shapes:
    return tuple(tuple(leaf.shape[1:]) for leaf in inputs)


def _covers(known: Shapes, shapes: Shapes) -> bool:
    """Whether an example of ``shapes`` is at least as large along every axis as one of ``known``."""
    return all(
        len(small) == len(large) and all(low <= high for low, high in zip(small, large, strict=True))
        for small, large in zip(known, shapes, strict=True)
    )
