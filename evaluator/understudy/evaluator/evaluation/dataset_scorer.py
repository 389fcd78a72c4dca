"""Scores one loaded checkpoint on one dataset, and records the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluator_errors import CancelledError
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.types import EvaluationRecord, EvaluationResult

Progress = Callable[[int, int | None], None]
"""Called with the examples scored so far and those of the dataset (None if unknown).

Must be quick and must not raise.
"""

_BATCH_TIMEOUT_SECONDS = 600.0


class DatasetScorer:
    """Runs whole datasets through evaluation streams. Thread-safe.

    Args:
        engine: Runs the batches.
        recorder: Records the results.
        batch_size: Examples per batch.
    """

    def __init__(self, *, engine: Engine, recorder: Recorder, batch_size: int) -> None:
        self._engine = engine
        self._recorder = recorder
        self._batch_size = batch_size

    def score(
        self,
        servable: Servable,
        dataset: EvaluationDataset,
        *,
        is_wanted: Callable[[], bool],
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> EvaluationRecord:
        """Score a servable, which must stay loaded meanwhile, and record the result. Blocks.

        Args:
            servable: The servable to score.
            dataset: The dataset to score it on.
            is_wanted: Called between batches; returns whether to continue.
            deadline: When the score is no longer wanted, on the `time.monotonic` clock.
            progress: Called after each batch.

        Raises:
            CancelledError: The score is no longer wanted.
            InvalidInputError: The dataset does not fit the model.
            NotEvaluableError: The model was not compiled.
            DeadlineExceededError: The deadline passed.
            OverloadedError: Too many examples of other evaluations wait.
            DrainingError: The evaluator is shutting down.
            LedgerError: The result cannot be recorded.
        """
        began = time.monotonic()
        result = self._run(servable, dataset, is_wanted, deadline, progress)
        return self._recorder.record_score(servable.digest, dataset, result, duration_seconds=time.monotonic() - began)

    def _run(
        self,
        servable: Servable,
        dataset: EvaluationDataset,
        is_wanted: Callable[[], bool],
        deadline: float | None,
        progress: Progress | None,
    ) -> EvaluationResult:
        """Keep one batch in progress while the next is read."""
        scorer = servable.slot.scorer(())
        scored = 0
        under_way: tuple[Future[Any], int] | None = None
        with EvaluationStream(servable.borrow(), scorer, self._engine) as stream:
            for batch in dataset.batches(servable.slot.signature, self._batch_size):
                if not is_wanted():
                    raise CancelledError(f"the evaluation of step {servable.step} on {dataset.name!r} was cancelled")
                scored += _wait(under_way)
                if progress is not None and scored:
                    progress(scored, dataset.examples)
                under_way = (stream.add(batch, deadline), batch.examples)
            scored += _wait(under_way)
            if progress is not None:
                progress(scored, dataset.examples)
            return stream.finish()


def _wait(under_way: tuple[Future[Any], int] | None) -> int:
    """Wait for a batch, if there is one, and return its examples."""
    if under_way is None:
        return 0
    future, examples = under_way
    future.result(_BATCH_TIMEOUT_SECONDS)
    return examples
