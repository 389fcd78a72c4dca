"""The training data, and how it is split into steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from understudy.experiments import Experiment
from understudy.experiments.arrays import IndexedExamples
from understudy.experiments.records import RecordExamples
from understudy.trainer.settings import TrainSettings
from understudy.trainer.trainer_errors import DataError

if TYPE_CHECKING:
    from understudy.experiments.experiment_data import TrainingData

_WINDOW_BYTES = 256 * 2**20
_WINDOW_EXAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """How a dataset is split into steps.

    Attributes:
        examples: Examples in one epoch.
        global_batch_size: Examples per step, over all replicas.
        seed: Seed of the shuffling.
        shuffle_buffer: Examples to shuffle among.
        cache: Whether to keep the examples in memory.
        keep_remainder: Whether an epoch's remainder begins the next epoch's first batch.
    """

    examples: int
    global_batch_size: int
    seed: int
    shuffle_buffer: int
    cache: bool
    keep_remainder: bool

    def facts(self, *, replicas: int) -> dict[str, int]:
        """Return what must not change for an exact resume."""
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
        """Examples of an epoch that are used for training."""
        return self.examples if self.keep_remainder else self.steps_per_epoch * self.global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch."""
        return self.examples // self.global_batch_size


def plan_of(data: TrainingData, experiment: Experiment, settings: TrainSettings, *, replicas: int) -> DataPlan:
    """Return the plan by an operator's settings; raise as `plan_data` does."""
    return plan_data(
        data,
        global_batch_size=settings.global_batch_size or experiment.global_batch_size,
        replicas=replicas,
        seed=settings.seed,
        shuffle_buffer=settings.shuffle_buffer,
        cache=settings.cache,
        keep_remainder=settings.remainder == "keep",
    )


def plan_data(
    data: TrainingData,
    *,
    global_batch_size: int,
    replicas: int,
    seed: int,
    shuffle_buffer: int | None,
    cache: bool,
    keep_remainder: bool,
) -> DataPlan:
    """Check that the data can be used for training, and return the plan.

    Without a cache or ``shuffle_buffer``, the shuffle buffer holds 256 MiB of examples, or 10,000 examples if they have
    no fixed size. Arrays are shuffled whole without a buffer.

    Raises:
        DataError: Its length is unknown or infinite, it holds less than a batch, its elements are not ``(x, y)`` or
            ``(x, y, sample_weight)``, the batch does not divide evenly, or it cannot be shuffled as configured.
    """
    spec = data.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise DataError(f"training_data() gives elements like {spec}; expected (x, y) or (x, y, sample_weight)")
    examples = _count(data)
    if global_batch_size % replicas:
        below = global_batch_size // replicas * replicas
        nearest = " or ".join(str(size) for size in (below, below + replicas) if size)
        raise DataError(
            f"global_batch_size is {global_batch_size}, which {replicas} replicas cannot share evenly; "
            f"choose {nearest}, or another number of replicas",
        )
    if examples < global_batch_size:
        raise DataError(f"training_data() has {examples} examples, fewer than one global batch of {global_batch_size}")
    is_cached = cache and isinstance(data, tf.data.Dataset)
    held = shuffle_buffer or (examples if is_cached else max(global_batch_size, _shuffle_buffer(data)))
    if isinstance(data, IndexedExamples) and held < examples:
        raise DataError(f"shuffle_buffer is {held}, but arrays are shuffled whole, without a buffer; leave it out")
    return DataPlan(
        examples=examples,
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle_buffer=min(held, examples),
        cache=is_cached,
        keep_remainder=keep_remainder,
    )


def _count(data: TrainingData) -> int:
    if not isinstance(data, tf.data.Dataset):
        return data.size
    examples = int(data.cardinality())
    if examples < 0:
        what = "repeats without end" if examples == tf.data.INFINITE_CARDINALITY else "does not know its length"
        raise DataError(
            f"training_data() {what}; expected one epoch, and, where TensorFlow cannot tell its length, "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))",
        )
    return examples


def _shuffle_buffer(data: TrainingData) -> int:
    """Return the shuffle buffer's size for data that is not all in memory."""
    if isinstance(data, IndexedExamples):
        return data.size
    if isinstance(data, RecordExamples):
        return _WINDOW_BYTES // max(1, data.mean_bytes)
    sizes = [_bytes(spec) for spec in tf.nest.flatten(data.element_spec)]
    known = [size for size in sizes if size is not None]
    return _WINDOW_BYTES // max(1, sum(known)) if len(known) == len(sizes) else _WINDOW_EXAMPLES


def _bytes(spec: Any) -> int | None:
    """Return the size of a tensor; None if it is not fixed."""
    if not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.string or not spec.shape.is_fully_defined():
        return None
    return int(spec.dtype.size) * math.prod(int(length) for length in spec.shape)
