"""The thread that evaluates checkpoints, and the scoring of whole datasets."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

import numpy as np

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream, ExampleScores
from understudy.evaluator.evaluation.input_wait import InputWait
from understudy.evaluator.evaluation.slices import Members
from understudy.evaluator.evaluation.table_collector import TableCollector
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    DrainingError,
    EvaluatorError,
    InvalidInputError,
    LedgerError,
    NotEvaluableError,
    OverloadedError,
    exhausted_resource,
)
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.servable import Handle, Servable
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.version_monitor import Backlog, Quarantine
from understudy.evaluator.threads import join
from understudy.evaluator.types import (
    Array,
    Batch,
    CheckpointInfo,
    EvaluationOutcome,
    EvaluationRecord,
    EvaluationResult,
    Progress,
)

_log = logging.getLogger(__name__)

_BATCH_TIMEOUT_SECONDS = 600.0
_PERMANENT = (InvalidInputError, NotEvaluableError)
_TRANSIENT = (CancelledError, DrainingError, LedgerError, OverloadedError)
_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 1.0
_MAX_WARNED = 1000


class DatasetScorer:
    """Runs whole datasets through evaluation streams. Thread-safe.

    Args:
        engine: Runs the batches.
        recorder: Records the results.
        observer: Told how long each evaluation waited for its examples.
        batch_size: Examples per batch.
        with_tables: Whether tables, the hardest examples and the outcomes of examples are recorded, too.
        breakdown: What to compute besides the metrics.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        recorder: Recorder,
        observer: Observer,
        batch_size: int,
        with_tables: bool = False,
        breakdown: BreakdownOptions | None = None,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._observer = observer
        self._batch_size = batch_size
        self._with_tables = with_tables
        self._breakdown = breakdown or BreakdownOptions()
        self._warned: set[tuple[str, str]] = set()

    def score(
        self,
        servable: Servable,
        dataset: EvaluationDataset,
        *,
        is_wanted: Callable[[], bool],
        deadline: float | None = None,
        progress: Progress | None = None,
        record: bool = True,
    ) -> EvaluationRecord:
        """Score a servable, which must stay loaded meanwhile, and record the result. Blocks.

        Args:
            servable: The servable to score.
            dataset: The dataset to score it on.
            is_wanted: Called between batches; returns whether to continue.
            deadline: When the score is no longer wanted, on the `time.monotonic` clock.
            progress: Called after each batch.
            record: Whether to record the result; if not, its sequence number is 0.

        Raises:
            CancelledError: The score is no longer wanted.
            InvalidInputError: The dataset does not fit the model.
            NotEvaluableError: The model was not compiled.
            DeadlineExceededError: The deadline passed.
            OverloadedError: Too many examples of other evaluations wait.
            DrainingError: The evaluator is shutting down.
            LedgerError: The result cannot be recorded.
        """
        metric_digest = servable.slot.metric_digest
        began = time.monotonic()
        slot = servable.slot
        tables = TableCollector(slot.output_tasks, slot.signature.outputs) if self._with_tables and record else None
        result = self._run(servable, dataset, is_wanted, deadline, progress=progress, tables=tables)
        duration = time.monotonic() - began
        self._warn(dataset.name, result.notes)
        if record:
            return self._recorder.record_score(
                servable.digest,
                dataset,
                result,
                duration_seconds=duration,
                metric_digest=metric_digest,
                scoring_digest=self.scoring_digest(servable),
                tables=None if tables is None else tables.document(),
            )
        return EvaluationRecord(
            sequence=0,
            step=result.step,
            checkpoint_digest=servable.digest,
            dataset=dataset.name,
            outcome=EvaluationOutcome.SCORED,
            metrics=result.metrics,
            examples=result.examples,
            duration_seconds=duration,
            recorded_at=time.time(),
            notes=result.notes,
            dataset_digest=dataset.digest,
            metric_digest=metric_digest,
            metric_digests=result.metric_digests,
            intervals=result.intervals,
            slices=result.slices,
            resamples=result.resamples,
            confidence=result.confidence,
        )

    def _warn(self, dataset: str, notes: Iterable[str]) -> None:
        """Log what a score lacks, once for each dataset."""
        for note in notes:
            if (dataset, note) not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add((dataset, note))
                _log.warning("an evaluation lacks something", extra={"dataset": dataset, "reason": note})

    def scoring_digest(self, servable: Servable) -> str:
        """Identify how a servable is scored: with which metrics, slices and resamples, and whether with tables."""
        digest = self._breakdown.digest(servable.slot.metric_digest)
        return f"{digest}+tables" if self._with_tables else digest

    def _run(
        self,
        servable: Servable,
        dataset: EvaluationDataset,
        is_wanted: Callable[[], bool],
        deadline: float | None,
        *,
        progress: Progress | None,
        tables: TableCollector | None,
    ) -> EvaluationResult:
        """Keep one batch in progress while the next is read."""
        slot = servable.slot
        batches = functools.partial(dataset.batches, slot.signature, self._batch_size)
        options = self._breakdown.with_quantiles_of(batches, [spec.name for spec in slot.signature.outputs])
        with_rows = tables is not None
        scorer = slot.scorer((), example_losses=with_rows, increments=not options.is_empty)
        scored = 0
        under_way: _UnderWay | None = None
        input_wait = InputWait()
        handle = servable.borrow()
        with EvaluationStream(handle, scorer, self._engine, keep_outputs=with_rows, breakdown=options) as stream:
            for batch in input_wait.timed(batches()):
                if not is_wanted():
                    raise CancelledError(f"the evaluation of step {servable.step} on {dataset.name!r} was cancelled")
                scored += _wait(under_way, tables)
                if progress is not None and scored:
                    progress(scored, dataset.examples)
                under_way = (stream.add(batch, deadline), batch)
                input_wait.computing(under_way[0])
            scored += _wait(under_way, tables)
            if tables is not None:
                tables.note(stream.without_example_losses)
            if progress is not None:
                progress(scored, dataset.examples)
            input_wait.warn(dataset)
            self._observer.evaluation_waited(input_wait.seconds)
            return stream.finish()


_UnderWay = tuple[Future[ExampleScores], Batch]


def _wait(under_way: _UnderWay | None, tables: TableCollector | None) -> int:
    """Wait for a batch, if there is one, count it in the tables, and return its examples."""
    if under_way is None:
        return 0
    future, batch = under_way
    scores = future.result(_BATCH_TIMEOUT_SECONDS)
    if tables is not None:
        tables.add(batch, scores, _masks(scores.members, batch.examples))
    return batch.examples


def _masks(members: Iterable[Members], examples: int) -> dict[str, Array]:
    """Return which examples of a batch belong to each slice, bool ``[examples]`` by its name."""
    masks = {}
    for name, rows in (pair for setting in members for pair in setting.rows()):
        masks[name] = np.zeros(examples, np.bool_)
        masks[name][rows] = True
    return masks


class Scoring(Protocol):
    """Scores and records, as `understudy.evaluator.evaluation.evaluation_worker.DatasetScorer` does."""

    def score(
        self, servable: Servable, dataset: EvaluationDataset, *, is_wanted: Callable[[], bool]
    ) -> EvaluationRecord:
        """Score a servable on a dataset and record the result."""


class EvaluationWorker:
    """Takes checkpoints from the backlog, loads each, and scores it on the remaining datasets.

    If a checkpoint fails on a dataset, it is tried again. After a permanent failure or the last attempt, the reason is
    recorded. Failures that are not the checkpoint's fault are not recorded: a shutdown, a full disk, an overload, or a
    lack of memory.

    Args:
        backlog: The checkpoints to evaluate.
        manager: Loads checkpoints.
        recorder: Provides the remaining datasets.
        scoring: Scores checkpoints.
        quarantine: The checkpoints that failed to load.
        failures: Counts failures by checkpoint and dataset.
        on_progress: Called after each checkpoint with a new record; must be quick and must not raise.
        on_scored: Called with each checkpoint that now has a result on every dataset; must be quick and must not raise.
    """

    def __init__(
        self,
        *,
        backlog: Backlog,
        manager: ServableManager,
        recorder: Recorder,
        scoring: Scoring,
        quarantine: Quarantine,
        failures: Quarantine,
        on_progress: Callable[[], None],
        on_scored: Callable[[CheckpointInfo], None],
    ) -> None:
        self._backlog = backlog
        self._manager = manager
        self._recorder = recorder
        self._scoring = scoring
        self._quarantine = quarantine
        self._failures = failures
        self._on_progress = on_progress
        self._on_scored = on_scored
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="understudy-evaluation")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Abort the current evaluation and end the thread. Idempotent.

        Raises:
            TimeoutError: A batch did not end in time.
        """
        self._closing.set()
        self._backlog.close()
        join(self._thread, timeout_seconds, error="a checkpoint was still being evaluated after")

    def _run(self) -> None:
        while (info := self._backlog.next()) is not None:
            try:
                progressed = self._examine(info)
            except Exception:  # noqa: BLE001 - the thread must survive any error of a checkpoint or a disk
                _log.exception("evaluation broken off, to be tried again", extra={"step": info.step})
                self._closing.wait(_PAUSE_SECONDS)
                progressed = False
            self._backlog.finished()
            if progressed:
                self._on_progress()

    def _examine(self, info: CheckpointInfo) -> bool:
        """Score a checkpoint on the datasets that may be tried now; return whether anything was recorded."""
        remaining = self._recorder.remaining(info.step, info.digest)
        datasets = [dataset for dataset in remaining if self._failures.admits(_key(info, dataset))]
        handle = self._acquire(info) if datasets and self._quarantine.admits(info.key) else None
        if handle is None:
            return False
        with handle:
            recorded = [self._settle(handle.servable, info, dataset) for dataset in datasets]
        if len(datasets) == len(remaining) and all(recorded):
            self._on_scored(info)
        return any(recorded)

    def _acquire(self, info: CheckpointInfo) -> Handle | None:
        """Wait for the checkpoint to be loaded; return None if that failed, which the manager has recorded."""
        try:
            acquiring = self._manager.acquire(info.step)
        except EvaluatorError:
            return None
        while not self._closing.is_set():
            try:
                return acquiring.result(_POLL_SECONDS)
            except FutureTimeoutError:
                continue
            except EvaluatorError:
                return None
        _give_back(acquiring)
        return None

    def _settle(self, servable: Servable, info: CheckpointInfo, dataset: EvaluationDataset) -> bool:
        """Score a checkpoint on a dataset, or handle the failure; return whether anything was recorded."""
        if self._closing.is_set():
            return False
        key = _key(info, dataset)
        try:
            self._scoring.score(servable, dataset, is_wanted=lambda: not self._closing.is_set())
        except _TRANSIENT as error:
            _log.warning("evaluation put off", extra={"step": info.step, "dataset": dataset.name, "reason": str(error)})
            self._closing.wait(_PAUSE_SECONDS)
            return False
        except Exception as error:  # noqa: BLE001 - a user's dataset or metric may raise anything; it is recorded
            if exhausted_resource(error) is not None:
                self._postpone(info, dataset, error)
                return False
            return self._note_failure(info, dataset, error)
        self._failures.clear(key)
        return True

    def _postpone(self, info: CheckpointInfo, dataset: EvaluationDataset, error: Exception) -> None:
        """Postpone a score until the machine may have enough resources; this never counts as a failure."""
        postponed = self._failures.postpone(_key(info, dataset), str(error)).postponed
        _log.warning(
            "evaluation put off for want of resources",
            extra={"step": info.step, "dataset": dataset.name, "reason": str(error), "postponed": postponed},
        )

    def _note_failure(self, info: CheckpointInfo, dataset: EvaluationDataset, error: Exception) -> bool:
        reason = str(error) if isinstance(error, EvaluatorError) else f"{type(error).__name__}: {error}"
        failure = self._failures.add(_key(info, dataset), reason, permanent=isinstance(error, _PERMANENT))
        _log.warning(
            "evaluation failed",
            extra={"step": info.step, "dataset": dataset.name, "attempts": failure.attempts},
            exc_info=error,
        )
        if failure.given_up:
            self._recorder.record_reason(
                info.step, info.digest, EvaluationOutcome.FAILED, failure.reason, dataset=dataset
            )
        return failure.given_up


def _key(info: CheckpointInfo, dataset: EvaluationDataset) -> tuple[int, str, str]:
    return (*info.key, dataset.name)


def _give_back(acquiring: Future[Handle]) -> None:
    """Cancel the request, or release the handle if it was already granted."""

    def release(done: Future[Handle]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().release()

    acquiring.cancel()
    acquiring.add_done_callback(release)
