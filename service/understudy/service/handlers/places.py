"""Bounds how many calls of a kind are under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from understudy.evaluator.evaluator_errors import OverloadedError

_RETRY_SECONDS = 1.0


class Places:
    """So many places, each for one call. Belongs to the event loop's thread.

    Args:
        count: How many there are.
        what: What takes them, as errors call it.
    """

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take a place for as long as the block runs.

        Raises:
            OverloadedError: There is none left.
        """
        if self._taken >= self._count:
            raise OverloadedError(
                f"{self._taken} {self._what} are under way, and no more may be; try again when one has ended",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
