"""The queued requests: their admission, their order, and the choice of the next batch."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from understudy.evaluator.batching.reserve import Reserve
from understudy.evaluator.evaluator_errors import (
    DeadlineExceededError,
    DrainingError,
    EvaluatorError,
    InvalidInputError,
    OverloadedError,
)
from understudy.evaluator.observer import Observer
from understudy.evaluator.types import Array, Arrays, CallerKey, ResultSink

MAX_PREDICTS_BEFORE_EVALUATE = 8
"""After this many Predict batches in a row, a waiting Evaluate batch runs."""

_REMEMBERED_BATCHES = 16


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
class QueuedPredict:
    """Examples to predict, and the receiver of the outcome. Times are on the `time.monotonic` clock, in seconds."""

    inputs: Arrays
    examples: int
    group: Hashable
    borrow: Borrow
    deadline: float | None
    arrived: float
    token: Any
    sink: ResultSink[Any]
    size: int
    """The bytes of the inputs; see `size_of`."""
    reserved_by: Hashable = None
    """The caller on whose account it waits in the reserve; None if it does not."""

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
class QueuedEvaluate:
    """Work for the device. Times are on the `time.monotonic` clock, in seconds.

    ``prepare`` is slow preparation that comes first, if any. ``trial`` runs the same model on generated data; None if
    the work itself does.
    """

    work: Callable[[], Any]
    prepare: Callable[[], object] | None
    trial: Callable[[], object] | None
    examples: int
    deadline: float | None
    arrived: float
    future: Future[Any]

    def begin(self) -> bool:
        """Mark it as running; return False if it was cancelled."""
        return self.future.set_running_or_notify_cancel()

    def forget(self, _: Future[Any]) -> None:
        """Let go of the work, which is done: what is cancelled may stay in a queue for long."""
        self.work, self.prepare, self.trial = _nothing, None, None

    def is_cancelled(self) -> bool:
        """Whether it was cancelled before it began."""
        return self.future.cancelled()

    def fail(self, error: Exception) -> None:
        """Deliver an error as the outcome."""
        self.future.set_exception(error)


def _nothing() -> None:
    """Stand in for work that is over."""


QueuedRequest = QueuedPredict | QueuedEvaluate

_STRING_BYTES = 33
"""What a string takes besides its characters and the reference to it."""


def size_of(inputs: Arrays) -> int:
    """Return the bytes of arrays, with their strings."""
    size = 0
    for array in inputs.values():
        size += array.nbytes
        if array.dtype.kind == "O":
            size += _STRING_BYTES * array.size + sum(map(len, array.ravel().tolist()))
    return size


def is_late(request: QueuedRequest) -> bool:
    """Whether the request's deadline has passed."""
    return request.deadline is not None and time.monotonic() >= request.deadline


def is_dead(request: QueuedRequest) -> bool:
    """Whether the request was cancelled or its deadline has passed."""
    return request.is_cancelled() or is_late(request)


def late(request: QueuedRequest) -> DeadlineExceededError:
    """Return the error of a request whose deadline has passed."""
    waited = time.monotonic() - request.arrived
    return DeadlineExceededError(f"the deadline passed after {waited:.3f} s in the queue, before the work began")


class PredictQueue:
    """Requests by group, each group in the order of arrival. Not thread-safe.

    Args:
        max_examples: The maximum number of queued examples, besides those in the reserve.
        max_bytes: The most bytes of their inputs, besides those in the reserve.

    Attributes:
        examples: The number of queued examples, with those in the reserve.
        max_bytes: See the argument.
        max_examples: See the argument.
        reserve: The room beside the queue.
        size: The bytes of the inputs of all queued examples.
    """

    def __init__(self, max_examples: int, max_bytes: int) -> None:
        self._groups: OrderedDict[Hashable, deque[QueuedPredict]] = OrderedDict()
        self.max_examples = max_examples
        self.max_bytes = max_bytes
        self.reserve = Reserve(max_examples, max_bytes)
        self.examples = 0
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[QueuedPredict]:
        return itertools.chain.from_iterable(self._groups.values())

    @property
    def requests(self) -> int:
        """The number of queued requests."""
        return sum(map(len, self._groups.values()))

    def is_full_for(self, examples: int, size: int) -> bool:
        """Whether examples with inputs of this many bytes fit at best into the reserve; False if nothing else waits."""
        if self.examples + examples <= self.max_examples and self.size + size <= self.max_bytes:
            return False
        reserve = self.reserve
        waiting, held = self.examples - reserve.examples, self.size - reserve.size
        return waiting > 0 and (waiting + examples > self.max_examples or held + size > self.max_bytes)

    def append(self, request: QueuedPredict) -> None:
        """Append a request to its group."""
        self._groups.setdefault(request.group, deque()).append(request)
        self.examples += request.examples
        self.size += request.size
        if request.reserved_by is not None:
            self.reserve.add(request.reserved_by, request.examples, request.size)

    def oldest(self) -> QueuedPredict:
        """Return the request that has waited longest; its group is next."""
        if len(self._groups) == 1:
            return next(iter(self))
        return min((group[0] for group in self._groups.values()), key=lambda request: request.arrived)

    def examples_like(self, request: QueuedPredict) -> int:
        """Return the number of queued examples in the request's group."""
        return sum(other.examples for other in self._groups.get(request.group, ()))

    def take_batch(self, max_batch_size: int) -> list[QueuedPredict]:
        """Remove and return the oldest request and the following ones of its group, up to the maximum batch size.

        Returns an empty list if the queue is empty.
        """
        batch = self.next_batch(max_batch_size)
        self.take(batch)
        return batch

    def take(self, batch: Sequence[QueuedPredict]) -> None:
        """Remove what `next_batch` returned."""
        if not batch:
            return
        waiting = self._groups[batch[0].group]
        for request in batch:
            waiting.popleft()
            self._discount(request)
        if not waiting:
            del self._groups[batch[0].group]

    def next_batch(self, max_batch_size: int) -> list[QueuedPredict]:
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

    def remove(self, unwanted: Callable[[QueuedPredict], bool]) -> list[QueuedPredict]:
        """Remove and return the requests for which ``unwanted`` is true."""
        everything = list(self)
        self._groups.clear()
        removed = []
        for request in everything:
            self._discount(request)
            if unwanted(request):
                removed.append(request)
            else:
                self.append(request)
        return removed

    def _discount(self, request: QueuedPredict) -> None:
        self.examples -= request.examples
        self.size -= request.size
        if request.reserved_by is not None:
            self.reserve.remove(request.reserved_by, request.examples, request.size)


class BatchScheduler:
    """Predict takes precedence over Evaluate, but not too often in a row. Not thread-safe.

    Args:
        max_batch_size: The maximum number of examples of one Predict batch.
        predicts: The queue of the Predict requests.

    Attributes:
        max_batch_size: See the argument. It may be changed.
        predicts: See the argument.
        evaluates: The queued batches of evaluations, in the order of arrival.
    """

    def __init__(self, max_batch_size: int, predicts: PredictQueue) -> None:
        self.max_batch_size = max_batch_size
        self.predicts = predicts
        self.evaluates: deque[QueuedEvaluate] = deque()
        self._predicts_in_a_row = 0

    def __bool__(self) -> bool:
        """Whether anything is queued."""
        return bool(self.predicts or self.evaluates)

    def is_evaluate_next(self) -> bool:
        """Whether an evaluation is next."""
        starved = self._predicts_in_a_row >= MAX_PREDICTS_BEFORE_EVALUATE
        return bool(self.evaluates) and (starved or not self.predicts)

    def next_predict_batch(self, most_examples: int) -> list[QueuedPredict]:
        """Dequeue the next Predict batch in its turn; see `extra_predict_batch`."""
        self._predicts_in_a_row += 1
        return self.extra_predict_batch(most_examples)

    def extra_predict_batch(self, most_examples: int | None = None) -> list[QueuedPredict]:
        """Dequeue a Predict batch out of turn, or nothing if none is queued.

        It has at most this many examples, unless its first request alone has more.
        """
        most = self.max_batch_size if most_examples is None else min(most_examples, self.max_batch_size)
        return self.predicts.take_batch(most)

    def next_predicts(self) -> list[QueuedPredict]:
        """Return the batch that `extra_predict_batch` would dequeue."""
        return self.predicts.next_batch(self.max_batch_size)

    def next_evaluate(self) -> QueuedEvaluate:
        """Dequeue the next batch of an evaluation."""
        self._predicts_in_a_row = 0
        return self.evaluates.popleft()

    def drain(self) -> list[QueuedRequest]:
        """Dequeue everything."""
        everything: list[QueuedRequest] = [*self.predicts.remove(lambda _: True), *self.evaluates]
        self.evaluates.clear()
        return everything


class LatencyEstimator:
    """Estimates how long queued examples take. Thread-safe.

    Args:
        max_batch_size: The maximum number of examples of one batch.
        concurrent_batches: How many batches run at the same time.

    Attributes:
        max_batch_size: See the argument. It may be changed.
        concurrent_batches: See the argument. It may be changed.
    """

    def __init__(self, max_batch_size: int, concurrent_batches: int = 1) -> None:
        self.max_batch_size = max_batch_size
        self.concurrent_batches = concurrent_batches
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=_REMEMBERED_BATCHES)
        self._recent_large: deque[float] = deque(maxlen=_REMEMBERED_BATCHES)
        self._batch_seconds = 0.0
        self._full_batch_seconds = 0.0

    def observe(self, examples: int, seconds: float) -> None:
        """Add the duration of a batch, including all work of its thread."""
        if examples > self.max_batch_size:
            return
        with self._lock:
            self._recent.append(seconds)
            self._batch_seconds = sum(self._recent) / len(self._recent)
            if 2 * examples >= self.max_batch_size:
                self._recent_large.append(seconds)
                self._full_batch_seconds = sum(self._recent_large) / len(self._recent_large)

    def estimate(self, examples: int) -> float:
        """Return how long this many examples are likely to take; 0 without measurements.

        Full batches count as long as recent large batches took, and the rest as long as an average batch.
        """
        full, rest = divmod(examples, self.max_batch_size)
        seconds = full * max(self._batch_seconds, self._full_batch_seconds) + (self._batch_seconds if rest else 0.0)
        return seconds if self.concurrent_batches == 1 else max(self._batch_seconds, seconds / self.concurrent_batches)


class Refusal(NamedTuple):
    """Why a request is refused: the reason for `Observer.rejected`, and the error for the caller."""

    reason: str
    error: EvaluatorError


def raise_refusal(refusal: Refusal | None, observer: Observer) -> None:
    """Raise the error of a refusal, if there is one, and notify the observer of it."""
    if refusal is not None:
        observer.rejected(refusal.reason)
        raise copy.copy(refusal.error)  # the frames of its traceback hold the refusal, and the request: else a cycle


class Admission:
    """Decides whether a request may be queued. Thread-safe.

    Args:
        max_queue_examples: The maximum number of queued examples of evaluations.
        latency: Estimates the latency of batches.
    """

    def __init__(self, max_queue_examples: int, latency: LatencyEstimator) -> None:
        self._max_queue_examples = max_queue_examples
        self._latency = latency
        self._closing = False

    def close(self) -> None:
        """Refuse all requests from now on."""
        self._closing = True

    def predict(
        self, examples: int, size: int, deadline: float | None, *, caller: CallerKey, queue: PredictQueue
    ) -> Refusal | None:
        """Return why a Predict request is refused, or None. One that waits alone may have any size.

        Args:
            examples: Its number of examples.
            size: The bytes of its inputs.
            deadline: On the `time.monotonic` clock, in seconds; None if there is none.
            caller: Who sends it, for the reserve of a full queue.
            queue: The requests that will be computed before it.

        Returns:
            InvalidInputError for more examples than the queue can ever hold, DrainingError after `close`,
            DeadlineExceededError if the deadline has passed, and OverloadedError if the queue is full or the deadline
            is likely to pass first.
        """
        if examples > queue.max_examples:
            accepted = f"at most {queue.max_examples} are accepted: split it"
            return Refusal("invalid", InvalidInputError(f"got {examples} examples in one request; {accepted}"))
        refusal = self._check(deadline, examples_ahead=queue.examples)
        if refusal is not None or not queue.is_full_for(examples, size):
            return refusal
        if queue.reserve.admits(caller(), examples, size):
            return None
        if queue.examples + examples > queue.max_examples:
            return self._full(
                f"{queue.examples} examples are waiting and at most {queue.max_examples} may", queue.examples
            )
        held = f"waiting requests hold {queue.size} bytes, and {size} more would exceed"
        return self._full(f"{held} the {queue.max_bytes} of --max-queue-mib", queue.examples)

    def evaluate(self, examples: int, deadline: float | None, *, waiting: int) -> Refusal | None:
        """Return why a batch of an evaluation is refused, or None; as `predict`, but of any size and without estimate.

        Args:
            examples: Its number of examples.
            deadline: On the `time.monotonic` clock, in seconds; None if there is none.
            waiting: The number of queued examples of evaluations.
        """
        refusal = self._check(deadline, examples_ahead=0)
        if refusal is None and waiting and waiting + examples > self._max_queue_examples:
            return self._full(f"{waiting} examples are waiting and at most {self._max_queue_examples} may", waiting)
        return refusal

    def _check(self, deadline: float | None, *, examples_ahead: int) -> Refusal | None:
        if self._closing:
            error = DrainingError("the evaluator is shutting down and takes no new work; ask another one")
            return Refusal("draining", error)
        return None if deadline is None else self._unmeetable(deadline, examples_ahead)

    def _unmeetable(self, deadline: float, examples_ahead: int) -> Refusal | None:
        left = deadline - time.monotonic()
        if left <= 0:
            return Refusal("deadline", DeadlineExceededError("the deadline has passed before the work could be queued"))
        needed = self._latency.estimate(examples_ahead) if examples_ahead else 0.0
        if needed <= left:
            return None
        error = OverloadedError(
            f"{examples_ahead} examples are waiting: the estimated wait {needed:.3f} s exceeds the remaining "
            f"deadline of {left:.3f} s; try again shortly, or with a longer deadline",
            retry_after_seconds=needed,
        )
        return Refusal("unmeetable", error)

    def _full(self, why: str, waiting: int) -> Refusal:
        message, retry_after = f"{why}; try again shortly", self._latency.estimate(waiting)
        error = OverloadedError(message, retry_after_seconds=retry_after) if retry_after else OverloadedError(message)
        return Refusal("queue_full", error)
