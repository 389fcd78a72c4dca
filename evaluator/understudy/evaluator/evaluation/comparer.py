"""Runs comparisons on threads of their own: loaded versions together, the others in turn."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from understudy.checkpoints.signature import Signature
from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluation.bootstrap import (
    configured_otherwise,
    lacking_slices,
    metric_differences,
    slice_differences,
)
from understudy.evaluator.evaluation.comparison import (
    BootstrapOptions,
    ComparedVersion,
    Comparison,
    DatasetBatches,
    LossResampling,
    ReplayableBatches,
    ResampledLoss,
    difference,
)
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream, ExampleScores
from understudy.evaluator.evaluation.slices import SliceError
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidInputError,
    OverloadedError,
    VersionNotFoundError,
)
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.ranking import LOSS
from understudy.evaluator.serving.servable import Handle, ModelSlot
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.types import Batch, EvaluationResult, MetricSpec, Progress

Read = Callable[[Signature], Iterator[Batch]]

MIN_VERSIONS = 2

MAX_VERSIONS = 16
"""Bounds the memory of a comparison."""

_THREADS = 4
_BATCH_TIMEOUT_SECONDS = 600.0


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
        progress: Called after each batch with how many examples of the versions together are scored, of how many.
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
        progress: Progress | None,
    ) -> None:
        self._manager = manager
        self._engine = engine
        self._on_open = on_open
        self._metrics = metrics
        self._bootstrap = bootstrap
        self._breakdown = bootstrap.breakdown
        self._deadline = deadline
        self._cancellation = cancellation
        self._progress = progress
        self._examples = 0
        self._total: int | None = None

    def run(self, steps: Sequence[int], batches: ReplayableBatches) -> Comparison:
        """Score every version and compare. Blocks.

        Raises:
            EvaluatorError: A version cannot be loaded or scored, or the comparison was cancelled.
        """
        self._total = None if batches.examples is None else len(steps) * batches.examples
        with closing(batches):
            return self._run(steps, batches)

    def _run(self, steps: Sequence[int], batches: ReplayableBatches) -> Comparison:
        handles = self._borrow_loaded(steps) or {0: self._acquire(steps[0])}
        self._find_quantiles(batches, next(iter(handles.values())).slot)
        later = [index for index in range(len(steps)) if index not in handles]
        scored = self._score(handles, lambda signature: batches.first(signature, keep=bool(later)))
        for index in later:
            scored |= self._score({index: self._acquire(steps[index])}, batches.again)
        return self._compare([scored[index] for index in range(len(steps))], in_turns=[steps[i] for i in later])

    def _find_quantiles(self, batches: ReplayableBatches, slot: ModelSlot) -> None:
        """Replace quantiles by edges, which all versions share."""
        if not self._breakdown.has_quantiles:
            return
        if not isinstance(batches, DatasetBatches):
            raise SliceError("quantiles are found only in datasets of the server; give edges, such as 'age:18,30,65'")
        self._breakdown = self._breakdown.with_quantiles_of(lambda: batches.again(slot.signature), slot.output_tasks)

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
            under_way: list[Future[ExampleScores]] = []
            examples = 0
            for batch in read(next(iter(handles.values())).slot.signature):
                self._cancellation.check()
                self._settle(under_way, examples, resampling)
                under_way, examples = [self._add(stream, batch) for stream in streams], batch.examples
                del batch  # it need not wait in memory for the next one
            self._settle(under_way, examples, resampling)
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
        scorer = handle.slot.scorer(self._metrics, example_losses=True, increments=True)
        stream = EvaluationStream(handle, scorer, self._engine, breakdown=self._breakdown)
        self._on_open(stream)
        return stream

    def _add(self, stream: EvaluationStream, batch: Batch) -> Future[ExampleScores]:
        """Queue a batch, waiting while the queue is full."""
        while True:
            try:
                return stream.add(batch, self._deadline)
            except OverloadedError as error:
                self._cancellation.check()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    raise DeadlineExceededError("the deadline passed while the queue was full") from error
                time.sleep(error.retry_after_seconds)

    def _settle(self, under_way: Sequence[Future[ExampleScores]], examples: int, resampling: LossResampling) -> None:
        """Wait for a batch of so many examples on every version, add its losses, and report the progress."""
        losses = [future.result(_BATCH_TIMEOUT_SECONDS).losses for future in under_way]
        present = [loss for loss in losses if loss is not None]
        if present and len(present) == len(losses):
            resampling.add(present)
        self._examples += len(under_way) * examples
        if self._progress is not None and under_way:
            self._progress(self._examples, self._total)

    def _compare(self, scored: Sequence[_Scored], *, in_turns: Sequence[int]) -> Comparison:
        first = scored[0]
        notes = []
        if any(version.without_example_losses for version in scored):
            reason = next(version.without_example_losses for version in scored if version.without_example_losses)
            notes.append(f"there is no interval, because examples have no losses of their own: {reason}")
        compared = [self._compared(version, first) for version in scored]
        if any(version.loss_difference and math.isinf(version.loss_difference.low) for version in compared):
            notes.append(
                "the difference of the losses has no bounds, because too many resamples draw no example, or one of an "
                "infinite loss"
            )
        if in_turns:
            notes.append(f"the steps {sorted(set(in_turns))} were not loaded and took turns on the same batches")
        others = [version.result for version in scored[1:]]
        for other in others:
            notes.extend(
                f"{name} of step {other.step} has another configuration than that of step {first.result.step}, so they "
                "are not compared; name the metrics to compare with"
                for name in sorted(configured_otherwise(first.result, other))
            )
            notes.extend(
                f"step {lacking.step} has no {', '.join(sorted(names))}, which step {having.step} has, so they are not "
                "compared; name the metrics to compare with"
                for lacking, having in ((first.result, other), (other, first.result))
                if (names := having.metrics.keys() - lacking.metrics.keys() - lacking.undefined.keys())
            )
            notes.extend(lacking_slices(first.result, other))
        confidence = self._bootstrap.confidence
        metrics = metric_differences(first.result, others, confidence=confidence)
        slices = slice_differences(first.result, others, confidence=confidence)
        return Comparison(
            versions=(
                compared[0],
                *(
                    replace(
                        version,
                        metric_differences=of_metrics,
                        slice_differences=tuple(of_slices),
                    )
                    for version, of_metrics, of_slices in zip(compared[1:], metrics, slices, strict=True)
                ),
            ),
            bootstrap=self._bootstrap,
            notes=tuple(notes),
        )

    def _compared(self, version: _Scored, first: _Scored) -> ComparedVersion:
        paired = None
        others = configured_otherwise(first.result, version.result)
        has_loss = LOSS not in {*others, *first.result.undefined, *version.result.undefined}
        if has_loss and version is not first and version.losses is not None and first.losses is not None:
            paired = difference(version.losses, first.losses, confidence=self._bootstrap.confidence)
        return ComparedVersion(
            score=version.result,
            differences={
                name: math.nan if name in others else value - first.result.metrics.get(name, math.nan)
                for name, value in version.result.metrics.items()
            },
            loss_difference=paired,
        )


class Comparer:
    """Compares versions. Thread-safe.

    Args:
        store: The known checkpoints.
        manager: Loads them and provides handles.
        engine: Runs the batches.
        on_open: Called with each stream, to close it when the evaluator is closed.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        manager: ServableManager,
        engine: Engine,
        on_open: Callable[[EvaluationStream], None],
    ) -> None:
        self._store = store
        self._manager = manager
        self._engine = engine
        self._on_open = on_open
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="understudy-compare")
        self._closing = False

    def submit(
        self,
        steps: Sequence[int],
        batches: ReplayableBatches,
        *,
        metrics: Sequence[MetricSpec],
        bootstrap: BootstrapOptions,
        deadline: float | None,
        progress: Progress | None = None,
    ) -> Future[Comparison]:
        """Compare versions with the first one. Cancelling the future aborts the comparison.

        Raises:
            InvalidInputError: There are too few or too many versions.
            VersionNotFoundError: There is no such checkpoint.
        """
        if not MIN_VERSIONS <= len(steps) <= MAX_VERSIONS:
            raise InvalidInputError(
                f"got {len(steps)} versions; {MIN_VERSIONS} to {MAX_VERSIONS} can be compared with one another"
            )
        for step in steps:
            self._check_exists(step)
        outcome: Future[Comparison] = Future()
        cancellation = CancellationToken(lambda: not (self._closing or outcome.cancelled()))
        outcome.add_done_callback(lambda done: cancellation.stop() if done.cancelled() else None)
        comparison_run = ComparisonRun(
            manager=self._manager,
            engine=self._engine,
            on_open=self._on_open,
            metrics=metrics,
            bootstrap=bootstrap,
            deadline=deadline,
            cancellation=cancellation,
            progress=progress,
        )
        self._executor.submit(_set_outcome, outcome, lambda: comparison_run.run(steps, batches))
        return outcome

    def stop(self) -> None:
        """Cancel all comparisons."""
        self._closing = True

    def close(self) -> None:
        """Wait for all comparisons to end. Call this after `stop`, when the engine and the manager are closed."""
        self._executor.shutdown(wait=True)

    def _check_exists(self, step: int) -> None:
        try:
            self._manager.borrow(step).release()
        except VersionNotFoundError:
            self._store.info(step)


def _set_outcome(outcome: Future[Comparison], run: Callable[[], Comparison]) -> None:
    """Run a comparison and set its outcome on a future that may be cancelled meanwhile."""
    if outcome.cancelled():
        return
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 - the future carries it
        if outcome.set_running_or_notify_cancel():
            outcome.set_exception(error)
        return
    if outcome.set_running_or_notify_cancel():
        outcome.set_result(result)
