"""The queue of requests for the device."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from understudy.evaluator.batching.result_sink import ResultSink
from understudy.evaluator.evaluator_errors import DeadlineExceededError
from understudy.evaluator.types import Array, Arrays


class RunnableSlot(Protocol):
    """The part of a slot that runs batches."""

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        """Return the outputs, ``[examples, ...]``, for inputs of any number of examples."""

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        """Launch the computation; return a function that waits for the outputs."""

    def try_out(self) -> None:
        """Run one generated example on every replica; raise the runtime's errors."""


class BorrowedHandle(Protocol):
    """A counted borrow of a loaded checkpoint."""

    @property
    def step(self) -> int:
        """The training step of the checkpoint."""

    @property
    def slot(self) -> RunnableSlot:
        """The slot that the checkpoint is loaded in."""

    def release(self) -> None:
        """Release the handle."""


Borrow = Callable[[], BorrowedHandle]


@dataclass(kw_only=True, eq=False, slots=True)
class PredictRequest:
    """Examples to predict, and the receiver of the outcome. Times are on the `time.monotonic` clock, in seconds."""

    inputs: Arrays
    examples: int
    group: Hashable
    borrow: Borrow
    deadline: float | None
    arrived: float
    token: Any
    sink: ResultSink[Any]

    def begin(self) -> bool:
        """Mark it as running; return False if it was cancelled."""
        return self.sink.begin(self.token)

    def is_cancelled(self) -> bool:
        """Whether it was cancelled before it began."""
        return self.sink.is_cancelled(self.token)

    def fail(self, error: Exception) -> None:
        """Deliver an error as the outcome."""
        self.sink.deliver([(self.token, error)])


@dataclass(kw_only=True, eq=False, slots=True)
class EvaluateRequest:
    """Work for the device. Times are on the `time.monotonic` clock, in seconds.

    ``trial`` runs the same model on generated data; None if the work itself does.
    """

    work: Callable[[], Any]
    trial: Callable[[], object] | None
    examples: int
    deadline: float | None
    arrived: float
    future: Future[Any]

    def begin(self) -> bool:
        """Mark it as running; return False if it was cancelled."""
        return self.future.set_running_or_notify_cancel()

    def is_cancelled(self) -> bool:
        """Whether it was cancelled before it began."""
        return self.future.cancelled()

    def fail(self, error: Exception) -> None:
        """Deliver an error as the outcome."""
        self.future.set_exception(error)


Request = PredictRequest | EvaluateRequest


def is_late(request: Request) -> bool:
    """Whether the request's deadline has passed."""
    return request.deadline is not None and time.monotonic() >= request.deadline


def is_dead(request: Request) -> bool:
    """Whether the request was cancelled or its deadline has passed."""
    return request.is_cancelled() or is_late(request)


def late(request: Request) -> DeadlineExceededError:
    """Return the error of a request whose deadline has passed."""
    waited = time.monotonic() - request.arrived
    return DeadlineExceededError(f"the deadline passed after {waited:.3f} s in the queue, before the work began")


class PredictQueue:
    """Requests by group, each group in the order of arrival. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Hashable, deque[PredictRequest]] = OrderedDict()
        self.examples = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[PredictRequest]:
        return itertools.chain.from_iterable(self._groups.values())

    def append(self, request: PredictRequest) -> None:
        """Append a request to its group."""
        self._groups.setdefault(request.group, deque()).append(request)
        self.examples += request.examples

    def oldest(self) -> PredictRequest:
        """Return the request that has waited longest; its group is next."""
        return min((group[0] for group in self._groups.values()), key=lambda request: request.arrived)

    def examples_like(self, request: PredictRequest) -> int:
        """Return the number of queued examples in the request's group."""
        return sum(other.examples for other in self._groups.get(request.group, ()))

    def take_batch(self, max_batch_size: int) -> list[PredictRequest]:
        """Remove and return the oldest request and the following ones of its group, up to the maximum batch size.

        Returns an empty list if the queue is empty.
        """
        batch = self.next_batch(max_batch_size)
        if not batch:
            return []
        waiting = self._groups[batch[0].group]
        for _ in batch:
            waiting.popleft()
        if not waiting:
            del self._groups[batch[0].group]
        self.examples -= sum(request.examples for request in batch)
        return batch

    def next_batch(self, max_batch_size: int) -> list[PredictRequest]:
        """Return the batch that `take_batch` would remove."""
        if not self._groups:
            return []
        waiting = iter(self._groups[self.oldest().group])
        batch = [next(waiting)]
        examples = batch[0].examples
        for request in waiting:
            examples += request.examples
            if examples > max_batch_size:
                break
            batch.append(request)
        return batch

    def remove(self, unwanted: Callable[[PredictRequest], bool]) -> list[PredictRequest]:
        """Remove and return the requests for which ``unwanted`` is true."""
        everything = list(self)
        self._groups.clear()
        self.examples = 0
        removed = []
        for request in everything:
            if unwanted(request):
                removed.append(request)
            else:
                self.append(request)
        return removed
