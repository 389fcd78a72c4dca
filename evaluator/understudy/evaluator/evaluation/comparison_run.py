"""Scores versions on the same batches: loaded versions together, the others in turn."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass

from understudy.checkpoints.signature import Signature
from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluation.bootstrap import BootstrapOptions, LossResampling, ResampledLoss, difference
from understudy.evaluator.evaluation.comparison_batches import ReplayableBatches
from understudy.evaluator.evaluation.comparison_result import ComparedVersion, Comparison
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    DeadlineExceededError,
    OverloadedError,
    VersionNotFoundError,
)
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.types import Array, Batch, EvaluationResult, MetricSpec

_BATCH_TIMEOUT_SECONDS = 600.0

Read = Callable[[Signature], Iterator[Batch]]


class CancellationToken:
    """Whether a result is still wanted; stopping also leaves the queue for a slot. Thread-safe.

    Args:
        ask: Returns whether it is wanted.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._acquiring: Future[Handle] | None = None

    def check(self) -> None:
        """Raise CancelledError if the result is no longer wanted."""
        if not self._ask():
            raise CancelledError("the comparison was cancelled")

    def stop(self) -> None:
        """Leave the queue."""
        with self._lock:
            if self._acquiring is not None:
                self._acquiring.cancel()

    def acquired(self, acquiring: Future[Handle]) -> Handle:
        """Wait for a handle.

        Raises:
            CancelledError: It is no longer wanted.
            EvaluatorError: It is not available.
        """
        with self._lock:
            self._acquiring = acquiring
        try:
            self.check()
            return acquiring.result()
        except (CancelledError, FutureCancelledError):
            if not acquiring.cancel() and not acquiring.cancelled():
                acquiring.result().release()
            raise CancelledError("the comparison was cancelled while it waited for a slot") from None


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """The result of one version."""

    result: EvaluationResult
    losses: ResampledLoss | None
    without_example_losses: str


class ComparisonRun:
    """One comparison.

    It never waits for a slot while it holds another, which prevents deadlocks.

    Args:
        manager: Loads versions and provides handles.
        engine: Runs the batches.
        on_open: Called with each stream.
        metrics: The metrics to compute; the compiled metrics if empty.
        bootstrap: Options of the confidence intervals.
        deadline: When the result is no longer wanted, on the `time.monotonic` clock.
        cancellation: Whether the result is still wanted.
    """

    def __init__(
        self,
        *,
        manager: ServableManager,
        engine: Engine,
        on_open: Callable[[EvaluationStream], None],
        metrics: Sequence[MetricSpec],
        bootstrap: BootstrapOptions,
        deadline: float | None,
        cancellation: CancellationToken,
    ) -> None:
        self._manager = manager
        self._engine = engine
        self._on_open = on_open
        self._metrics = metrics
        self._bootstrap = bootstrap
        self._deadline = deadline
        self._cancellation = cancellation

    def run(self, steps: Sequence[int], batches: ReplayableBatches) -> Comparison:
        """Score every version and compare. Blocks.

        Raises:
            EvaluatorError: A version cannot be loaded or scored, or the comparison was cancelled.
        """
        with closing(batches):
            return self._run(steps, batches)

    def _run(self, steps: Sequence[int], batches: ReplayableBatches) -> Comparison:
        handles = self._borrow_loaded(steps) or {0: self._acquire(steps[0])}
        later = [index for index in range(len(steps)) if index not in handles]
        scored = self._score(handles, lambda signature: batches.first(signature, keep=bool(later)))
        for index in later:
            scored |= self._score({index: self._acquire(steps[index])}, batches.again)
        return self._compare([scored[index] for index in range(len(steps))], in_turns=[steps[i] for i in later])

    def _borrow_loaded(self, steps: Sequence[int]) -> dict[int, Handle]:
        handles = {}
        for index, step in enumerate(steps):
            try:
                handles[index] = self._manager.borrow(step)
            except VersionNotFoundError:
                continue
        return handles

    def _acquire(self, step: int) -> Handle:
        return self._cancellation.acquired(self._manager.acquire(step, deadline=self._deadline))

    def _score(self, handles: Mapping[int, Handle], read: Read) -> dict[int, _Scored]:
        """Score some versions side by side, and release their handles."""
        resampling = LossResampling(self._bootstrap, versions=len(handles))
        with ExitStack() as stack:
            for handle in handles.values():
                stack.callback(handle.release)
            streams = [stack.enter_context(self._open(handle)) for handle in handles.values()]
            under_way: list[Future[Array | None]] = []
            for batch in read(next(iter(handles.values())).slot.signature):
                self._cancellation.check()
                _settle(under_way, resampling)
                under_way = [self._add(stream, batch) for stream in streams]
            _settle(under_way, resampling)
            results = [stream.finish() for stream in streams]
        losses = resampling.results()
        return {
            index: _Scored(
                result=result,
                losses=None if stream.without_example_losses else loss,
                without_example_losses=stream.without_example_losses,
            )
            for index, stream, result, loss in zip(handles, streams, results, losses, strict=True)
        }

    def _open(self, handle: Handle) -> EvaluationStream:
        stream = EvaluationStream(handle, handle.slot.scorer(self._metrics, example_losses=True), self._engine)
        self._on_open(stream)
        return stream

    def _add(self, stream: EvaluationStream, batch: Batch) -> Future[Array | None]:
        """Queue a batch, waiting while the queue is full."""
        while True:
            try:
                return stream.add(batch, self._deadline)
            except OverloadedError as error:
                self._cancellation.check()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    raise DeadlineExceededError("the deadline passed while the queue was full") from error
                time.sleep(error.retry_after_seconds)

    def _compare(self, scored: Sequence[_Scored], *, in_turns: Sequence[int]) -> Comparison:
        first = scored[0]
        notes = []
        if any(version.without_example_losses for version in scored):
            reason = next(version.without_example_losses for version in scored if version.without_example_losses)
            notes.append(f"there is no interval, because examples have no losses of their own: {reason}")
        if in_turns:
            notes.append(f"the steps {sorted(set(in_turns))} were not loaded and took turns on the same batches")
        return Comparison(
            versions=tuple(self._compared(version, first) for version in scored),
            bootstrap=self._bootstrap,
            notes=tuple(notes),
        )

    def _compared(self, version: _Scored, first: _Scored) -> ComparedVersion:
        paired = None
        if version is not first and version.losses is not None and first.losses is not None:
            paired = difference(version.losses, first.losses, confidence=self._bootstrap.confidence)
        return ComparedVersion(
            score=version.result,
            differences={
                name: value - first.result.metrics.get(name, math.nan) for name, value in version.result.metrics.items()
            },
            loss_difference=paired,
        )


def _settle(under_way: Sequence[Future[Array | None]], resampling: LossResampling) -> None:
    """Wait for a batch on every version, and add its losses."""
    losses = [future.result(_BATCH_TIMEOUT_SECONDS) for future in under_way]
    present = [loss for loss in losses if loss is not None]
    if present and len(present) == len(losses):
        resampling.add(present)
