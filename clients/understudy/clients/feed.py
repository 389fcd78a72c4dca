"""Passes a caller's messages to gRPC, which iterates them on its own thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Feed(Generic[Message]):
    """Wraps an iterator: ends without an error when it raises, and keeps the error for the caller's thread.

    Otherwise grpcio would log the error and report a cancelled call.
    """

    def __init__(self, messages: Iterator[Message]) -> None:
        self._messages = messages
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise StopIteration from error

    def check(self) -> None:
        """Raise the error of the wrapped iterator, if it raised one."""
        if self._error is not None:
            raise self._error
