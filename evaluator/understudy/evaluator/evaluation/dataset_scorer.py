"""Scores a checkpoint on a whole dataset, and records the result."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream, ExampleScores
from understudy.evaluator.evaluation.slices import Members, columns_of
from understudy.evaluator.evaluation.table_collector import TableCollector
from understudy.evaluator.evaluator_errors import CancelledError
from understudy.evaluator.model.scorer import Scorer
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.recorder import Recorder, entry_of
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.types import Array, Batch, EvaluationRecord, EvaluationResult, Progress

_log = logging.getLogger(__name__)

_BATCH_TIMEOUT_SECONDS = 600.0
_MAX_WARNED = 1000

_TOO_MUCH_WAITING = 0.4
_SHORTEST_SECONDS = 10.0
"""A warning is due if an evaluation of this length waited for its examples for this share of it."""


class ComputedOutputs(NamedTuple):
    """The outputs of a dataset that are computed elsewhere.

    ``batches`` are for a scorer of outputs, and ``notes`` says what is notable about where they were computed.
    """

    batches: Iterable[Batch]
    notes: Callable[[], Sequence[str]]


class OutputSource(Protocol):
    """Computes the outputs of checkpoints elsewhere."""

    def computed(
        self,
        servable: Servable,
        dataset: EvaluationDataset,
        *,
        batch_size: int,
        columns: frozenset[str],
        is_wanted: Callable[[], bool],
    ) -> AbstractContextManager[ComputedOutputs]:
        """Return the outputs of a dataset in the context in which they are computed.

        Args:
            servable: The checkpoint.
            dataset: The dataset.
            batch_size: Examples per batch.
            columns: The inputs and features that the batches need besides, for slices.
            is_wanted: Called now and then; returns whether to continue.

        Raises:
            ClusterError: They cannot be computed now.
        """


class DatasetScorer:
    """Runs whole datasets through evaluation streams. Thread-safe.

    Args:
        engine: Runs the batches.
        recorder: Records the results.
        observer: Notified of how long each evaluation waited for its examples.
        batch_size: Examples per batch.
        with_tables: Whether tables, the hardest examples and the outcomes of examples are recorded, too.
        breakdown: What to compute besides the metrics.
        outputs: Computes the outputs of models whose score needs nothing else; None to compute all here.
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
        outputs: OutputSource | None = None,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._observer = observer
        self._batch_size = batch_size
        self._with_tables = with_tables
        self._breakdown = breakdown or BreakdownOptions()
        self._outputs = outputs
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
            ClusterError: The outputs cannot be computed elsewhere now.
        """
        metric_digest = servable.slot.metric_digest
        began = time.monotonic()
        slot = servable.slot
        tables = TableCollector(slot.output_tasks, slot.signature.outputs) if self._with_tables and record else None
        result = self._run(servable, dataset, is_wanted, deadline, progress=progress, tables=tables)
        duration = time.monotonic() - began
        undefined = (f"{name} is undefined: {reason}" for name, reason in result.undefined.items())
        self._warn(dataset.name, (*result.notes, *undefined))
        if record:
            return self._recorder.record_score(
                servable.digest,
                dataset,
                result,
                duration_seconds=duration,
                metric_digest=metric_digest,
                scoring_digest=self.scoring_digest(metric_digest),
                tables=None if tables is None else tables.document(),
            )
        entry = entry_of(result, servable.digest, dataset, duration_seconds=duration, metric_digest=metric_digest)
        return replace(entry, recorded_at=time.time())

    def _warn(self, dataset: str, notes: Iterable[str]) -> None:
        """Log what a score lacks, once for each dataset."""
        for note in notes:
            if (dataset, note) not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add((dataset, note))
                _log.warning("an evaluation lacks something", extra={"dataset": dataset, "reason": note})

    def scoring_digest(self, metric_digest: str) -> str:
        """Identify a way of scoring: with metrics of this digest, slices and resamples, and whether with tables."""
        digest = self._breakdown.digest(metric_digest)
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
        read = functools.partial(dataset.batches, slot.signature, self._batch_size)
        options = self._breakdown.with_quantiles_of(read, slot.output_tasks)
        with_rows = tables is not None
        scored = 0
        under_way: _UnderWay | None = None
        with (
            self._source(servable, dataset, options, is_wanted, with_rows=with_rows) as source,
            EvaluationStream(
                servable.borrow(), source.scorer, self._engine, keep_outputs=with_rows, breakdown=options
            ) as stream,
        ):
            for batch in source.batches:
                if not is_wanted():
                    raise CancelledError(f"the evaluation of step {servable.step} on {dataset.name!r} was cancelled")
                scored += _wait(under_way, tables)
                if progress is not None and scored:
                    progress(scored, dataset.examples)
                under_way = (stream.add(batch, deadline), batch)
                source.computing(under_way[0])
            scored += _wait(under_way, tables)
            if tables is not None:
                tables.note(stream.without_example_losses)
            if progress is not None:
                progress(scored, dataset.examples)
            result = stream.finish()
            return replace(result, notes=(*result.notes, *source.finish()))

    @contextmanager
    def _source(
        self,
        servable: Servable,
        dataset: EvaluationDataset,
        options: BreakdownOptions,
        is_wanted: Callable[[], bool],
        *,
        with_rows: bool,
    ) -> Iterator[_Source]:
        """Yield where the batches come from, and what scores them."""
        slot = servable.slot
        forms = {"example_losses": with_rows, "increments": not options.is_empty}
        if self._outputs is None or slot.scores_whole:
            input_wait = InputWait()

            def finish() -> Sequence[str]:
                input_wait.warn(dataset)
                self._observer.evaluation_waited(input_wait.seconds)
                return [] if self._outputs is None else [f"the cluster was not used: {'; '.join(slot.scores_whole)}"]

            yield _Source(
                scorer=slot.scorer((), **forms),
                batches=input_wait.timed(dataset.batches(slot.signature, self._batch_size)),
                computing=input_wait.computing,
                finish=finish,
            )
            return
        scorer = slot.scorer_of_outputs((), **forms)
        columns = columns_of(options.slices)
        with self._outputs.computed(
            servable, dataset, batch_size=self._batch_size, columns=columns, is_wanted=is_wanted
        ) as computed:
            yield _Source(scorer=scorer, batches=computed.batches, computing=lambda _: None, finish=computed.notes)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What an evaluation reads.

    Attributes:
        scorer: A scorer of the batches.
        batches: The batches.
        computing: Called with the future of each batch.
        finish: Called after the last batch; returns notes on the score.
    """

    scorer: Scorer
    batches: Iterable[Batch]
    computing: Callable[[Future[Any]], None]
    finish: Callable[[], Sequence[str]]


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


class InputWait:
    """Times the reading of one evaluation's batches. Not thread-safe.

    Reading counts as waiting while no batch is being computed.

    Args:
        clock: Monotonic clock, in seconds.

    Attributes:
        seconds: How long the evaluation has waited for its examples.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._idle_since: float | None = self._began
        self._has_first = False
        self.seconds = 0.0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. The first is not counted, as it also opens files and traces graphs."""
        iterator = iter(batches)
        asked = self._clock()
        while (batch := next(iterator, None)) is not None:
            came = self._clock()
            if self._has_first and self._idle_since is not None:
                self.seconds += came - max(asked, self._idle_since)
            self._has_first = True
            yield batch
            asked = self._clock()

    def computing(self, batch: Future[Any]) -> None:
        """Count the time until a batch is done as that of the model."""
        self._idle_since = None

        def done(_: Future[Any]) -> None:
            self._idle_since = self._clock()

        batch.add_done_callback(done)

    def warn(self, dataset: EvaluationDataset) -> None:
        """Log what helps if the examples took much of the time so far."""
        total = self._clock() - self._began
        if total < _SHORTEST_SECONDS or self.seconds <= _TOO_MUCH_WAITING * total:
            return
        _log.warning(
            "an evaluation waited for its examples: in the dataset's pipeline, give map() "
            "num_parallel_calls=tf.data.AUTOTUNE and end it with prefetch(); or store the examples as the model takes "
            "them, in an .npz file or with tf.data.Dataset.save",
            extra={"dataset": dataset.name, "seconds": total, "waited_seconds": self.seconds},
        )
