"""The thread that evaluates checkpoints, and what it does about failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import (
    CancelledError,
    ClusterError,
    DrainingError,
    EvaluatorError,
    InvalidInputError,
    LedgerError,
    NotEvaluableError,
    OverloadedError,
    exhausted_resource,
)
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.backlog import Backlog
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.serving.servable import Handle, Servable
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.threads import join
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, EvaluationRecord

_log = logging.getLogger(__name__)

_PERMANENT = (InvalidInputError, NotEvaluableError)
_TRANSIENT = (CancelledError, DrainingError, LedgerError, OverloadedError)
_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 1.0


class Scoring(Protocol):
    """Scores and records, as `understudy.evaluator.evaluation.dataset_scorer.DatasetScorer` does."""

    def score(
        self, servable: Servable, dataset: EvaluationDataset, *, is_wanted: Callable[[], bool]
    ) -> EvaluationRecord:
        """Score a servable on a dataset and record the result."""


class EvaluationWorker:
    """Takes checkpoints from the backlog, loads each, and scores it on the remaining datasets.

    If a checkpoint fails on a dataset, it is tried again. After a permanent failure or the last attempt, the reason is
    recorded. Failures that are not the checkpoint's fault are not recorded: a shutdown, a full disk, an overload, a
    lack of memory, or a cluster that cannot be used.

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
                progressed = self._evaluate(info)
            except Exception:  # noqa: BLE001 - the thread must survive any error of a checkpoint or a disk
                _log.exception("evaluation broken off, to be tried again", extra={"step": info.step})
                self._closing.wait(_PAUSE_SECONDS)
                progressed = False
            self._backlog.finished()
            if progressed:
                self._on_progress()

    def _evaluate(self, info: CheckpointInfo) -> bool:
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
        _cancel_or_release(acquiring)
        return None

    def _settle(self, servable: Servable, info: CheckpointInfo, dataset: EvaluationDataset) -> bool:
        """Score a checkpoint on a dataset, or handle the failure; return whether anything was recorded."""
        if self._closing.is_set():
            return False
        key = _key(info, dataset)
        try:
            self._recorder.check_present()
            self._scoring.score(servable, dataset, is_wanted=lambda: not self._closing.is_set())
        except _TRANSIENT as error:
            _log.warning("evaluation put off", extra={"step": info.step, "dataset": dataset.name, "reason": str(error)})
            self._closing.wait(_PAUSE_SECONDS)
            return False
        except Exception as error:  # noqa: BLE001 - a user's dataset or metric may raise anything; it is recorded
            if isinstance(error, ClusterError) or exhausted_resource(error) is not None:
                self._postpone(info, dataset, error)
                return False
            return self._note_failure(info, dataset, error)
        self._failures.clear(key)
        return True

    def _postpone(self, info: CheckpointInfo, dataset: EvaluationDataset, error: Exception) -> None:
        """Postpone a score until there may be enough resources, or a cluster; this never counts as a failure."""
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


def _cancel_or_release(acquiring: Future[Handle]) -> None:
    """Cancel the request, or release the handle if it was already granted."""

    def release(done: Future[Handle]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().release()

    acquiring.cancel()
    acquiring.add_done_callback(release)
