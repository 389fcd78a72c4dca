"""The input pipeline: which examples are in which step is a function of the step alone.

Epoch ``e`` is shuffled by ``seed + e``; a step takes one global batch; what is left of an epoch and fills no batch is
dropped, or kept as the beginning of the next epoch's first batch. So no batch is ever smaller than the others, and a
training that resumes at a step sees what it would have seen without the interruption, on any number of replicas and
workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from understudy.experiments import Experiment, ExperimentError
from understudy.trainer.errors import DataError

_SEEDS = 2**31
_WORKER_STRIDE = 1_000_003  # more epochs than anybody trains
_ENDLESS = tf.int64.max
_GLOBAL_SEED = 1  # anything but 0, with which TensorFlow takes no seed that a graph computes


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """How a dataset is cut into steps.

    Attributes:
        examples: In one epoch.
        global_batch_size: Examples per step, over all replicas.
        seed: Of the shuffling.
        shuffle_buffer: Examples to shuffle among.
        cache: Whether to keep the examples in memory.
        keep_remainder: Whether what is left of an epoch goes into the next one's first batch.
    """

    examples: int
    global_batch_size: int
    seed: int
    shuffle_buffer: int
    cache: bool
    keep_remainder: bool

    def facts(self, *, replicas: int) -> dict[str, int]:
        """Return what must stay the same for a training to go on exactly."""
        return {
            "replicas": replicas,
            "global_batch_size": self.global_batch_size,
            "examples": self.examples,
            "seed": self.seed,
            "shuffle_buffer": self.shuffle_buffer,
            "keep_remainder": int(self.keep_remainder),
        }

    @property
    def examples_per_epoch(self) -> int:
        """Examples of an epoch that are trained on."""
        return self.examples if self.keep_remainder else self.steps_per_epoch * self.global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch."""
        return self.examples // self.global_batch_size


def plan_data(
    dataset: tf.data.Dataset,
    *,
    global_batch_size: int,
    replicas: int,
    seed: int,
    shuffle_buffer: int | None,
    cache: bool,
    keep_remainder: bool,
) -> DataPlan:
    """Check that a dataset of single examples can be trained on, and return how.

    Raises:
        DataError: Its length is unknown or infinite, it holds less than a batch, its elements are not ``(x, y)`` or
            ``(x, y, sample_weight)``, or the batch cannot be shared out evenly.
    """
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise DataError(f"training_data() gives elements like {spec}; expected (x, y) or (x, y, sample_weight)")
    examples = int(dataset.cardinality())
    if examples < 0:
        what = "repeats without end" if examples == tf.data.INFINITE_CARDINALITY else "does not know its length"
        raise DataError(
            f"training_data() {what}; expected one epoch, and, where TensorFlow cannot tell its length, "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))",
        )
    if global_batch_size % replicas:
        below = global_batch_size // replicas * replicas
        nearest = " or ".join(str(size) for size in (below, below + replicas) if size)
        raise DataError(
            f"global_batch_size is {global_batch_size}, which {replicas} replicas cannot share evenly; "
            f"choose {nearest}, or another number of replicas",
        )
    if examples < global_batch_size:
        raise DataError(f"training_data() has {examples} examples, fewer than one global batch of {global_batch_size}")
    return DataPlan(
        examples=examples,
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle_buffer=min(shuffle_buffer or examples, examples),
        cache=cache,
        keep_remainder=keep_remainder,
    )


def training_data(experiment: Experiment) -> tf.data.Dataset:
    """Return an experiment's training data; raise ExperimentError if its code raises."""
    try:
        return experiment.training_data()
    except Exception as error:
        raise ExperimentError(f"{experiment.name}: training_data() raised {type(error).__name__}: {error}") from error


def global_batches(
    dataset: tf.data.Dataset, plan: DataPlan, *, first_step: int, worker: int | tf.Tensor = 0
) -> tf.data.Dataset:
    """Return the endless dataset of global batches ``[global_batch_size, ...]`` from step ``first_step`` on.

    Args:
        dataset: Of single examples.
        plan: How to cut it.
        first_step: Steps done before.
        worker: The index of a worker that trains on its own: each shuffles differently.
    """
    # TensorFlow mixes its global seed into every seed given, and a user's code may have changed it.
    tf.random.set_seed(_GLOBAL_SEED)
    examples = dataset.cache() if plan.cache else dataset
    epoch, examples_in_epoch = divmod(first_step * plan.global_batch_size, plan.examples_per_epoch)

    def shuffled(epoch: tf.Tensor) -> tf.data.Dataset:
        seed = tf.math.floormod(plan.seed + epoch + _WORKER_STRIDE * tf.cast(worker, tf.int64), _SEEDS)
        order = examples.shuffle(plan.shuffle_buffer, seed=seed, reshuffle_each_iteration=False)
        return order.take(plan.examples_per_epoch)

    endless = tf.data.Dataset.range(epoch, _ENDLESS).flat_map(shuffled)
    remaining = endless.skip(examples_in_epoch)
    return remaining.batch(plan.global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def distribute(strategy: tf.distribute.Strategy, batches: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """Share out every global batch over the replicas of all workers."""
    options = tf.data.Options()
    # FILE would make skip() count per worker, OFF would give every worker all of each batch.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return strategy.experimental_distribute_dataset(batches.with_options(options))
