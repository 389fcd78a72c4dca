"""Scores a dataset whose outputs workers compute; the loss and the metrics are updated here, once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluation.slices import columns_of
from understudy.evaluator.libraries import library_version
from understudy.evaluator.model.scorer import Scorer
from understudy.evaluator.model.scorers import as_inputs
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.sharding.coordinator import ShardCoordinator
from understudy.evaluator.sharding.platform_facts import SOFTWARE
from understudy.evaluator.sharding.pool import Facts, WorkerPool
from understudy.evaluator.sharding.progress_file import ProgressFile, StoredProgress
from understudy.evaluator.sharding.schedule import WorkerTimeouts
from understudy.evaluator.sharding.work import (
    BATCHES_PER_SHARD,
    Work,
    count_of,
    described,
    load_slot,
    open_data,
    shards_of,
    timeouts_for,
)
from understudy.evaluator.types import Batch, EvaluationResult, MetricSpec, Progress

_BATCH_SECONDS = 600.0
_CLOSE_SECONDS = 60.0
_QUEUED_BATCHES = 4
_FORMAT = 3

MakePool = Callable[[Work], WorkerPool]
"""Makes the pool of workers for some work."""


def evaluate_files(
    work: Work,
    *,
    step: int,
    metrics: tuple[MetricSpec, ...] = (),
    breakdown: BreakdownOptions | None = None,
    make_pool: MakePool | None = None,
    timeouts: WorkerTimeouts | None = None,
    batches_per_shard: int = BATCHES_PER_SHARD,
    progress: Progress | None = None,
    progress_file: ProgressFile | None = None,
) -> EvaluationResult:
    """Score a checkpoint on a dataset in files, as one device would.

    A model whose score needs more than its outputs is scored without workers, and a note says why. With a progress
    file, the same call in another process goes on where this one ended.

    Args:
        work: The checkpoint and the dataset. Its ``columns`` and features follow from the slices.
        step: The step of the checkpoint.
        metrics: The metrics; the compiled ones if empty.
        breakdown: What to compute besides the metrics of all examples.
        make_pool: Makes the pool of workers; None to compute everything here.
        timeouts: How long workers may take.
        batches_per_shard: The number of batches of each shard.
        progress: Called with the examples scored so far; None for no calls.
        progress_file: Stores the progress, and has that of an earlier process; None to begin at the beginning.

    Raises:
        InvalidInputError: The data do not fit the model.
        ConfigurationError: The progress file is of another evaluation.
        ShardingError: The workers cannot compute a shard.
        StorageError: The progress file cannot be written.
        EvaluatorError: The checkpoint cannot be loaded, the data cannot be read, or the model has no score.
    """
    breakdown = breakdown or BreakdownOptions()
    columns = columns_of(breakdown.slices)
    work = replace(work, columns=columns, data=replace(work.data, features=columns))
    dataset = open_data(work.data)
    slot = load_slot(work)

    def read(first_example: int = 0) -> Iterator[Batch]:
        return dataset.batches(slot.signature, work.batch_size, first_example=first_example)

    stored = None
    if progress_file is not None:
        stored = progress_file.begin(_job(work, dataset, slot, step=step, metrics=metrics, breakdown=breakdown))
    scored = 0 if stored is None else stored.examples
    breakdown = breakdown.with_quantiles_of(read, slot.output_tasks)
    with_increments = not breakdown.is_empty
    if make_pool is None or slot.scores_whole:
        scorer = slot.scorer(metrics, increments=with_increments)
        with _opened(slot, scorer, work, step=step, breakdown=breakdown, stored=stored) as stream:
            total = dataset.examples if progress_file is None else count_of(dataset, slot, work)
            scoring = _Scoring(stream, total, progress, progress_file)
            result = scoring.run(read(scored), scored)
        unused = () if make_pool is None else (f"no workers were used: {'; '.join(slot.scores_whole)}",)
        return replace(result, notes=(*result.notes, *unused))

    examples = count_of(dataset, slot, work)
    shards = [
        shard
        for shard in shards_of(examples, work.batch_size, batches=batches_per_shard)
        if shard.first_example + shard.examples > scored
    ]
    scorer = slot.scorer_of_outputs(metrics, increments=with_increments)
    work = replace(work, data=described(work.data, dataset))
    pool = make_pool(work)
    timeouts = timeouts or timeouts_for(work.data)
    facts = () if stored is None else stored.facts
    with (
        ShardCoordinator(shards, pool, timeouts=timeouts, facts=facts) as coordinator,
        _opened(slot, scorer, work, step=step, breakdown=breakdown, stored=stored) as stream,
    ):
        skipped = (scored - shards[0].first_example) // work.batch_size
        scoring = _Scoring(stream, examples, progress, progress_file, lambda: coordinator.facts)
        result = scoring.run(itertools.islice(received(coordinator), skipped, None), scored)
        return replace(result, notes=(*result.notes, *coordinator.notes))


def _job(
    work: Work,
    dataset: EvaluationDataset,
    slot: Slot,
    *,
    step: int,
    metrics: tuple[MetricSpec, ...],
    breakdown: BreakdownOptions,
) -> Mapping[str, Any]:
    """Return what the state of an evaluation depends on."""
    named = [[metric.name, dict(metric.config)] for metric in metrics]
    return {
        "format": _FORMAT,
        "step": step,
        "model": work.model.digest,
        "dataset": dataset.digest,
        "batch_size": work.batch_size,
        "metrics": json.loads(json.dumps(named, default=str)),
        "scoring": breakdown.digest(slot.metric_digest),
        **{name: library_version(name) for name in SOFTWARE},
    }


@contextmanager
def _opened(
    slot: Slot,
    scorer: Scorer,
    work: Work,
    *,
    step: int,
    breakdown: BreakdownOptions,
    stored: StoredProgress | None,
) -> Iterator[EvaluationStream]:
    """Yield an evaluation stream on the only version of an engine of its own, with the state that was stored."""
    settings = EngineSettings(max_batch_size=work.batch_size, max_queue_examples=_QUEUED_BATCHES * work.batch_size)
    engine = Engine(settings, SilentObserver())
    servable = Servable(step=step, digest=work.model.digest, slot=slot)
    try:
        with EvaluationStream(servable.borrow(), scorer, engine, breakdown=breakdown) as stream:
            if stored is not None:
                stream.restore(stored.state)
            yield stream
    finally:
        engine.close(_CLOSE_SECONDS)


@dataclass(frozen=True)
class _Scoring:
    """Scores batches on a stream, reports the progress and stores it."""

    stream: EvaluationStream
    total: int | None
    progress: Progress | None
    file: ProgressFile | None
    facts: Callable[[], Sequence[Facts]] = tuple

    def run(self, batches: Iterator[Batch], scored: int) -> EvaluationResult:
        """Return the score of all batches, of which those of ``scored`` examples were scored before."""
        if scored:
            self._report(scored)
        for batch in batches:
            self.stream.add(batch).result(_BATCH_SECONDS)
            scored += batch.examples
            if self.file is not None and self.total is not None and scored < self.total:  # a batch must follow
                self.file.offer(scored, self.stream.stored, self.facts())
            self._report(scored)
        result = self.stream.finish()
        if self.file is not None:
            self.file.end()
        return result

    def _report(self, scored: int) -> None:
        if self.progress is not None:
            self.progress(scored, self.total)


def received(coordinator: ShardCoordinator, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[Batch]:
    """Yield the batches that workers have computed, in order, for a scorer of outputs."""
    for _, result in coordinator.results(is_wanted):
        for computed in result:
            yield Batch(
                inputs=as_inputs(computed.outputs, computed.masks),
                targets=computed.targets,
                sample_weights=computed.sample_weights,
                features=computed.features,
            )
