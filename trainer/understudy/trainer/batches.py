"""The input pipeline: the examples of a step depend on the step alone.

Epoch ``e`` has its own order, derived from the seed. A step uses one global batch. A remainder that fills no batch is
dropped, or kept as the beginning of the next epoch's first batch. So all batches have the same size, and a training
that resumes at a step reads the same examples as without the interruption.

- A dataset is read in order and shuffled by ``seed + e`` among ``shuffle_buffer`` examples; if it is cached, later
  epochs come from memory. To resume, earlier examples of the epoch are read again and skipped.
- TFRecord files are read in shuffled order, several at once, and shuffled likewise. Skipped records are not parsed.
- From arrays, a step reads only the examples that a pseudorandom permutation selects.

A global batch is split into equal parts, one per replica, in their order. From arrays, a worker reads the examples of
its own parts only. From TFRecord files it reads all records and parses its own. A dataset it reads whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from understudy.experiments.arrays import IndexedExamples
from understudy.experiments.records import RecordExamples
from understudy.trainer.data import DataPlan

if TYPE_CHECKING:
    from understudy.experiments.experiment_data import TrainingData

_SEEDS = 2**31
_WORKER_STRIDE = 1_000_003  # more than any number of epochs
_ENDLESS = tf.int64.max
_GLOBAL_SEED = 1  # not 0, with which TensorFlow rejects seeds that a graph computes
_PERMUTATION_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Share:
    """The parts of every global batch that one process reads.

    Attributes:
        first: Index of the first part.
        count: Number of parts.
        of: Number of equal parts in a global batch.
    """

    first: int = 0
    count: int = 1
    of: int = 1


_WHOLE = Share()


def global_batches(
    data: TrainingData,
    plan: DataPlan,
    *,
    first_step: int,
    worker: int | tf.Tensor = 0,
    share: Share = _WHOLE,
) -> tf.data.Dataset:
    """Return the endless dataset of global batches ``[global_batch_size, ...]`` from step ``first_step`` on.

    Args:
        data: Single examples.
        plan: How to split them.
        first_step: Steps done before.
        worker: The index of a worker that trains independently; each shuffles differently.
        share: Which parts ``[global_batch_size / share.of, ...]`` to return instead, one after the other.
    """
    # TensorFlow mixes its global seed into every given seed, and user code may have changed it.
    tf.random.set_seed(_GLOBAL_SEED)
    cut = _Cut(plan, first_step=first_step, worker=tf.cast(worker, tf.int64), share=share)
    if isinstance(data, IndexedExamples):
        parts = cut.arrays(data)
    elif isinstance(data, RecordExamples):
        parts = cut.records(data)
    else:
        parts = cut.stream(data)
    # With a known infinite cardinality, steps need not ask all workers for another batch.
    endless = parts.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return endless.prefetch(tf.data.AUTOTUNE)


def distribute(
    strategy: tf.distribute.Strategy, data: TrainingData, plan: DataPlan, *, first_step: int
) -> Iterator[object]:
    """Return the global batches from ``first_step`` on, each split over the replicas of all workers."""

    def parts_of_this_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = context.num_replicas_in_sync
        count = replicas // context.num_input_pipelines
        share = Share(first=context.input_pipeline_id * count, count=count, of=replicas)
        return global_batches(data, plan, first_step=first_step, share=share)

    return iter(strategy.distribute_datasets_from_function(parts_of_this_worker))


@tf.autograph.experimental.do_not_convert
def _second(_: tf.Tensor, part: object) -> object:
    return part


class _Cut:
    """Splits examples into parts of global batches."""

    def __init__(self, plan: DataPlan, *, first_step: int, worker: tf.Tensor, share: Share) -> None:
        self._plan = plan
        self._first_step = first_step
        self._worker = worker
        self._share = share
        self._rows = plan.global_batch_size // share.of

    def stream(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Read in order; cached, if planned."""
        examples = dataset.cache() if self._plan.cache else dataset
        return self._own_parts(self._shuffled(lambda _: examples))

    def records(self, data: RecordExamples) -> tf.data.Dataset:
        """Shuffle the files, then the records; parse this process's own."""

        def in_some_order(epoch: tf.Tensor) -> tf.data.Dataset:
            return data.records(self._permute(tf.range(len(data.files), dtype=tf.int64), epoch, len(data.files)))

        records = self._shuffled(in_some_order)
        if self._share.count < self._share.of:
            records = self._own_parts(records).unbatch()
        examples = records.map(data.parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return self._batch(examples)

    def arrays(self, data: IndexedExamples) -> tf.data.Dataset:
        """Read the examples of each part."""
        plan, share = self._plan, self._share

        def read_part(number: tf.Tensor) -> Any:
            step = self._first_step + number // share.count
            part = share.first + number % share.count
            positions = step * plan.global_batch_size + part * self._rows + tf.range(self._rows, dtype=tf.int64)
            epoch = positions // plan.examples_per_epoch
            return data.fetch(self._permute(positions % plan.examples_per_epoch, epoch, plan.examples))

        return tf.data.Dataset.counter().map(read_part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def _shuffled(self, epoch_of: Callable[[tf.Tensor], tf.data.Dataset]) -> tf.data.Dataset:
        """Return the examples or records of successive epochs, each shuffled, from the first step on."""
        plan = self._plan
        first_epoch, skipped = divmod(self._first_step * plan.global_batch_size, plan.examples_per_epoch)

        @tf.autograph.experimental.do_not_convert
        def shuffled(epoch: tf.Tensor) -> tf.data.Dataset:
            seed = tf.math.floormod(plan.seed + epoch + _WORKER_STRIDE * self._worker, _SEEDS)
            order = epoch_of(epoch).shuffle(plan.shuffle_buffer, seed=seed, reshuffle_each_iteration=False)
            return order.take(plan.examples_per_epoch)

        return tf.data.Dataset.range(first_epoch, _ENDLESS).flat_map(shuffled).skip(skipped)

    def _own_parts(self, examples: tf.data.Dataset) -> tf.data.Dataset:
        """Batch all examples, and keep this process's parts."""
        parts, share = self._batch(examples), self._share
        if share.count == share.of:
            return parts

        @tf.autograph.experimental.do_not_convert
        def is_own(number: tf.Tensor, _: object) -> tf.Tensor:
            return (number % share.of) // share.count == share.first // share.count

        return parts.enumerate().filter(is_own).map(_second)

    def _batch(self, examples: tf.data.Dataset) -> tf.data.Dataset:
        return examples.batch(self._rows, drop_remainder=True)

    def _permute(self, places: tf.Tensor, epoch: tf.Tensor, size: int) -> tf.Tensor:
        """Return the examples at these places, int64 ``[n]``, of the epochs ``[]`` or ``[n]``."""
        epochs = tf.broadcast_to(epoch, tf.shape(places))
        seeds = [tf.fill(tf.shape(places), tf.constant(self._plan.seed, tf.int64)), epochs]
        workers = tf.fill(tf.shape(places), self._worker)
        return tf.raw_ops.RandomIndexShuffle(
            index=places,
            seed=tf.stack([*seeds, workers], axis=1),
            max_index=tf.constant(size - 1, tf.int64),
            rounds=_PERMUTATION_ROUNDS,
        )
