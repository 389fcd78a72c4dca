"""Limits the number of concurrent calls of a kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from understudy.evaluator.evaluator_errors import OverloadedError

_RETRY_SECONDS = 1.0


class Places:
    """A limited number of places, each for one call. Belongs to the event loop's thread.

    Args:
        count: The number of places.
        what: The name of the calls in errors.
    """

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: All places are taken.
        """
        if self._taken >= self._count:
            raise OverloadedError(
                f"{self._taken} {self._what} are open, which is the limit; try again when one has ended",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
