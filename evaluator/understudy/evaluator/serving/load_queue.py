"""The requests that wait for a checkpoint to be loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from understudy.evaluator.evaluator_errors import EvaluatorError
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.slot_pool import Purpose
from understudy.evaluator.types import CheckpointInfo


@dataclass(eq=False)
class Request:
    """A request for a handle on a checkpoint.

    ``deadline`` is on the manager's clock, ``since`` on the `time.monotonic` clock.
    """

    info: CheckpointInfo
    purpose: Purpose
    deadline: float | None
    future: Future[Handle] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)

    def refuse(self, error: EvaluatorError) -> None:
        """Resolve the future with an error unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class LoadQueue:
    """Requests in the order of arrival. Not thread-safe: the manager guards it with its lock."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Append a request."""
        self._requests.append(request)

    def remove(self, request: Request) -> None:
        """Remove one request."""
        self._requests.remove(request)

    def remove_if(self, wanted: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the requests for which ``wanted`` is true."""
        removed = [request for request in self._requests if wanted(request)]
        self._requests = [request for request in self._requests if request not in removed]
        return removed

    def heads(self) -> Iterator[Request]:
        """Yield the first request of each purpose: serving versions before on-demand versions."""
        for purpose in Purpose:
            head = next((request for request in self._requests if request.purpose is purpose), None)
            if head is not None:
                yield head

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if there is none."""
        return min((request.deadline for request in self._requests if request.deadline is not None), default=None)
