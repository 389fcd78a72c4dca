"""The memory for request bodies that are still arriving, of all calls on one port together."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from understudy.evaluator.evaluator_errors import OverloadedError

_RETRY_SECONDS = 1.0


class BodyBudget:
    """Bounds the bytes that unfinished bodies hold. Belongs to the event loop's thread.

    Args:
        max_bytes: The most bytes at once.

    Attributes:
        max_bytes: The most bytes at once.
        held_bytes: The bytes held now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class BodyShare:
    """What one body holds of a budget, inside a ``with`` block, which gives it back.

    Args:
        budget: The budget.
    """

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback
        self._budget.held_bytes -= self._held
        self._held = 0

    def hold(self, size: int) -> None:
        """Hold this many bytes from now on, in place of those before.

        Raises:
            OverloadedError: All bodies together would hold too many.
        """
        budget, more = self._budget, size - self._held
        if more > 0 and budget.held_bytes + more > budget.max_bytes:
            raise OverloadedError(
                f"unfinished request bodies hold {budget.held_bytes} bytes, and {more} more would exceed the "
                f"{budget.max_bytes} of --max-body-mib; try again",
                retry_after_seconds=_RETRY_SECONDS,
            )
        budget.held_bytes += more
        self._held = size
