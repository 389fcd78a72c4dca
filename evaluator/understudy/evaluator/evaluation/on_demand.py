"""Evaluations on request: of streams, of datasets, of versions compared, and replays; loaded on demand if necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.comparer import Comparer
from understudy.evaluator.evaluation.comparison import BootstrapOptions, Comparison, ReplayableBatches
from understudy.evaluator.evaluation.dataset_scorer import DatasetScorer
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluation.replay_stream import ReplayStream
from understudy.evaluator.evaluation.resample_memory import ResampleMemory
from understudy.evaluator.evaluation.servable_stream import OpenStreams
from understudy.evaluator.evaluation.slices import SliceError
from understudy.evaluator.evaluator_errors import DrainingError
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.types import CheckpointInfo, EvaluationRecord, MetricSpec, Progress

_T = TypeVar("_T")

_STREAM_THREADS = 2
_SCORING_THREADS = 2

Work = Callable[[Handle, Callable[[], bool]], _T]
"""Called with the handle, which it must release or keep, and a function that returns whether the result is wanted."""


class ServableExecutor(Generic[_T]):
    """Waits for checkpoints to be loaded, then runs work on its own threads. Thread-safe.

    Args:
        manager: Loads checkpoints.
        threads: The number of threads.
        name: The name of the threads.
        discard: Called with a result that is no longer wanted.
    """

    def __init__(
        self, manager: ServableManager, *, threads: int, name: str, discard: Callable[[_T], None] | None = None
    ) -> None:
        self._manager = manager
        self._discard = discard
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._closing = False

    def submit(self, step: int, work: Work[_T], *, deadline: float | None) -> Future[_T]:
        """Run work once a step is loaded. Cancelling the future leaves the queue, or cancels the work.

        Raises:
            VersionNotFoundError: There is no such checkpoint.
            DrainingError: The evaluator is being closed.
        """
        acquiring = self._manager.acquire(step, deadline=deadline)
        outcome: Future[_T] = Future()
        outcome.add_done_callback(lambda done: done.cancelled() and acquiring.cancel())
        acquiring.add_done_callback(lambda acquired: self._begin(acquired, outcome, work))
        return outcome

    def stop(self) -> None:
        """Cancel all work."""
        self._closing = True

    def close(self) -> None:
        """Wait for all work to end. Call this after `stop`, when the manager's queue is empty."""
        self._executor.shutdown(wait=True)

    def _begin(self, acquired: Future[Handle], outcome: Future[_T], work: Work[_T]) -> None:
        if acquired.cancelled():
            return
        error = acquired.exception()
        if error is not None:
            _fail(outcome, error)
            return
        handle = acquired.result()
        try:
            self._executor.submit(self._work, handle, outcome, work)
        except RuntimeError:
            handle.release()
            _fail(outcome, DrainingError("the evaluator is shutting down"))

    def _work(self, handle: Handle, outcome: Future[_T], work: Work[_T]) -> None:
        try:
            result = work(handle, lambda: not (self._closing or outcome.cancelled()))
        except Exception as error:  # noqa: BLE001 - the future carries it
            handle.release()
            _fail(outcome, error)
            return
        if outcome.set_running_or_notify_cancel():
            outcome.set_result(result)
        elif self._discard is not None:
            self._discard(result)


def _fail(outcome: Future[_T], error: BaseException) -> None:
    if outcome.set_running_or_notify_cancel():
        outcome.set_exception(error)


class OnDemandEvaluations:
    """The evaluations that callers request. Thread-safe.

    Args:
        store: The known checkpoints.
        manager: Loads them and provides handles.
        engine: Runs the batches.
        scorer: Scores datasets and records the results.
        recorder: Provides the recorded results.
        streams: Receives every open stream.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        manager: ServableManager,
        engine: Engine,
        scorer: DatasetScorer,
        recorder: Recorder,
        streams: OpenStreams,
    ) -> None:
        self._store = store
        self._engine = engine
        self._scorer = scorer
        self._recorder = recorder
        self._streams = streams
        self._memory = ResampleMemory()
        self._opening: ServableExecutor[EvaluationStream] = ServableExecutor(
            manager, threads=_STREAM_THREADS, name="understudy-open", discard=EvaluationStream.close
        )
        self._replaying: ServableExecutor[ReplayStream] = ServableExecutor(
            manager, threads=1, name="understudy-open", discard=ReplayStream.close
        )
        self._scoring: ServableExecutor[EvaluationRecord] = ServableExecutor(
            manager, threads=_SCORING_THREADS, name="understudy-score"
        )
        self._comparer = Comparer(store=store, manager=manager, engine=engine, on_open=streams.add)
        self._parts = (self._opening, self._replaying, self._scoring, self._comparer)

    def open_stream(
        self, step: int, metrics: Sequence[MetricSpec], *, breakdown: BreakdownOptions | None, deadline: float | None
    ) -> Future[EvaluationStream]:
        """See `understudy.evaluator.evaluator.Evaluator.open_stream`."""
        options = breakdown or BreakdownOptions()
        if options.has_quantiles:
            raise SliceError("a stream of batches has no quantiles; give edges, such as 'age:18,30,65'")

        def work(handle: Handle, _: Callable[[], bool]) -> EvaluationStream:
            scorer = handle.slot.scorer(metrics, increments=not options.is_empty)
            stream = EvaluationStream(handle, scorer, self._engine, breakdown=options, memory=self._memory)
            self._streams.add(stream)
            return stream

        return self._opening.submit(step, work, deadline=deadline)

    def open_replay(self, step: int, *, deadline: float | None) -> Future[ReplayStream]:
        """See `understudy.evaluator.evaluator.Evaluator.open_replay`."""

        def work(handle: Handle, _: Callable[[], bool]) -> ReplayStream:
            stream = ReplayStream(handle, self._engine)
            self._streams.add(stream)
            return stream

        return self._replaying.submit(step, work, deadline=deadline)

    def score(
        self,
        step: int,
        dataset: EvaluationDataset,
        *,
        deadline: float | None,
        progress: Progress | None,
        record: bool,
        rescore: bool,
    ) -> Future[EvaluationRecord]:
        """See `understudy.evaluator.evaluator.Evaluator.score_dataset`."""
        known = self._store.find(step)
        recorded = None if known is None else self._recorder.score(step, known.digest, dataset)
        if known is not None and recorded is not None and rescore:
            recorded = self._scored_alike(known, dataset, recorded.metric_digest)
        if recorded is not None:
            done: Future[EvaluationRecord] = Future()
            done.set_result(recorded)
            return done

        def work(handle: Handle, is_wanted: Callable[[], bool]) -> EvaluationRecord:
            with handle:
                way = self._scorer.scoring_digest(handle.slot.metric_digest)
                recorded = self._recorder.score(step, handle.servable.digest, dataset, scoring_digest=way)
                return recorded or self._scorer.score(
                    handle.servable, dataset, is_wanted=is_wanted, deadline=deadline, progress=progress, record=record
                )

        return self._scoring.submit(step, work, deadline=deadline)

    def _scored_alike(
        self, info: CheckpointInfo, dataset: EvaluationDataset, metric_digest: str
    ) -> EvaluationRecord | None:
        """Return the score in the present way, if it is known without loading the checkpoint what that is.

        Args:
            info: The checkpoint.
            dataset: The dataset.
            metric_digest: The configuration of the metrics in an earlier score.
        """
        if not self._store.holds_metrics(info):
            return None
        way = self._scorer.scoring_digest(metric_digest)
        return self._recorder.score(info.step, info.digest, dataset, scoring_digest=way)

    def compare(
        self,
        steps: Sequence[int],
        batches: ReplayableBatches,
        *,
        metrics: Sequence[MetricSpec],
        bootstrap: BootstrapOptions | None,
        deadline: float | None,
        progress: Progress | None,
    ) -> Future[Comparison]:
        """See `understudy.evaluator.evaluator.Evaluator.compare`."""
        return self._comparer.submit(
            steps,
            batches,
            metrics=metrics,
            bootstrap=bootstrap or BootstrapOptions(),
            deadline=deadline,
            progress=progress,
        )

    def stop(self) -> None:
        """Cancel all evaluations."""
        for part in self._parts:
            part.stop()

    def close(self) -> None:
        """End the threads. Call this after `stop`, when the engine and the manager are closed."""
        for part in self._parts:
            part.close()
