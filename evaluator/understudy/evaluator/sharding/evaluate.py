"""Scores a dataset whose outputs workers compute; the loss and the metrics are updated here, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluation.slices import columns_of
from understudy.evaluator.model.scorer import Scorer
from understudy.evaluator.model.scorers import as_inputs
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.sharding.coordinator import ShardCoordinator
from understudy.evaluator.sharding.pool import WorkerPool
from understudy.evaluator.sharding.schedule import Patience
from understudy.evaluator.sharding.work import BATCHES_PER_SHARD, Work, count_of, load_slot, open_data, shards_of
from understudy.evaluator.types import Batch, EvaluationResult, MetricSpec, Progress

_BATCH_SECONDS = 600.0
_CLOSE_SECONDS = 60.0
_QUEUED_BATCHES = 4

MakePool = Callable[[Work], WorkerPool]
"""Makes the pool of workers for some work."""


def evaluate_files(
    work: Work,
    *,
    step: int,
    metrics: tuple[MetricSpec, ...] = (),
    breakdown: BreakdownOptions | None = None,
    make_pool: MakePool | None = None,
    patience: Patience | None = None,
    batches_per_shard: int = BATCHES_PER_SHARD,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Score a checkpoint on a dataset in files, as one device would.

    A model whose score needs more than its outputs is scored without workers, and a note says why.

    Args:
        work: The checkpoint and the dataset. Its ``columns`` and features follow from the slices.
        step: The step of the checkpoint.
        metrics: The metrics; the compiled ones if empty.
        breakdown: What to compute besides the metrics of all examples.
        make_pool: Makes the pool of workers; None to compute everything here.
        patience: How long workers may take.
        batches_per_shard: The number of batches of each shard.
        progress: Called with the examples scored so far; None for no calls.

    Raises:
        InvalidInputError: The data do not fit the model.
        ShardingError: The workers cannot compute a shard.
        EvaluatorError: The checkpoint cannot be loaded, the data cannot be read, or the model has no score.
    """
    breakdown = breakdown or BreakdownOptions()
    columns = columns_of(breakdown.slices)
    work = replace(work, columns=columns, data=replace(work.data, features=columns))
    dataset = open_data(work.data)
    slot = load_slot(work)

    def read() -> Iterator[Batch]:
        return dataset.batches(slot.signature, work.batch_size)

    breakdown = breakdown.with_quantiles_of(read, [spec.name for spec in slot.signature.outputs])
    with_increments = not breakdown.is_empty
    if make_pool is None or slot.scores_whole:
        with _opened(slot, slot.scorer(metrics, increments=with_increments), work, step, breakdown) as stream:
            result = _score(stream, read(), dataset.examples, progress)
        unused = () if make_pool is None else (f"no workers were used: {'; '.join(slot.scores_whole)}",)
        return replace(result, notes=(*result.notes, *unused))

    examples = count_of(dataset, slot, work)
    shards = shards_of(examples, work.batch_size, batches=batches_per_shard)
    pool = make_pool(replace(work, data=replace(work.data, digest=dataset.digest)))
    scorer = slot.scorer_of_outputs(metrics, increments=with_increments)
    with (
        ShardCoordinator(shards, pool, patience=patience) as coordinator,
        _opened(slot, scorer, work, step, breakdown) as stream,
    ):
        result = _score(stream, _received(coordinator), examples, progress)
        return replace(result, notes=(*result.notes, *coordinator.notes))


@contextmanager
def _opened(
    slot: Slot, scorer: Scorer, work: Work, step: int, breakdown: BreakdownOptions
) -> Iterator[EvaluationStream]:
    """Yield an evaluation stream on the only version of an engine of its own."""
    settings = EngineSettings(max_batch_size=work.batch_size, max_queue_examples=_QUEUED_BATCHES * work.batch_size)
    engine = Engine(settings, SilentObserver())
    servable = Servable(step=step, digest=work.model.digest, slot=slot)
    try:
        with EvaluationStream(servable.borrow(), scorer, engine, breakdown=breakdown) as stream:
            yield stream
    finally:
        engine.close(_CLOSE_SECONDS)


def _score(
    stream: EvaluationStream, batches: Iterator[Batch], total: int | None, progress: Progress | None
) -> EvaluationResult:
    scored = 0
    for batch in batches:
        stream.add(batch).result(_BATCH_SECONDS)
        scored += batch.examples
        if progress is not None:
            progress(scored, total)
    return stream.finish()


def _received(coordinator: ShardCoordinator) -> Iterator[Batch]:
    for _, result in coordinator.results():
        for computed in result:
            yield Batch(
                inputs=as_inputs(computed.outputs, computed.masks),
                targets=computed.targets,
                sample_weights=computed.sample_weights,
                features=computed.features,
            )
