"""What a pool of workers is: the interface, its events, and the shards and results that pass through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from understudy.evaluator.types import Arrays

WorkerId = int
"""Identifies a worker within its pool. A replacement has a new one."""

Facts = Mapping[str, str]
"""What the bits of a worker's results depend on, by name; see `understudy.evaluator.sharding.platform_facts`."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive whole batches of a dataset.

    Attributes:
        index: Its place among the shards, from 0.
        first_example: The place of its first example in the dataset.
        examples: The number of its examples.
    """

    index: int
    first_example: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class ComputedBatch:
    """What a model returned for a batch, and what the loss, the metrics and the slices need besides.

    Attributes:
        outputs: The outputs by name, each ``[examples, ...]``.
        masks: The Keras masks of the outputs that have one, by the names of the outputs.
        targets: See `understudy.evaluator.types.Batch`.
        sample_weights: See `understudy.evaluator.types.Batch`.
        features: The columns that slices need, inputs of the model included, ``[examples]`` by name.
    """

    outputs: Arrays
    masks: Arrays = field(default_factory=dict)
    targets: Arrays = field(default_factory=dict)
    sample_weights: Arrays = field(default_factory=dict)
    features: Arrays = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(next(iter(self.outputs.values())))


ShardResult = Sequence[ComputedBatch]
"""The batches of a shard, in order."""


@dataclass(frozen=True, kw_only=True)
class WorkerReady:
    """A worker has loaded the model and the data, and takes shards."""

    worker: WorkerId
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class ShardComputed:
    """A worker has computed a shard, and takes the next."""

    worker: WorkerId
    shard: int
    result: ShardResult


@dataclass(frozen=True, kw_only=True)
class WorkerGone:
    """A worker has ended, for this reason. It may have been working on a shard."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkFailed:
    """The model or the data have an error that every worker would find."""

    worker: WorkerId
    error: Exception


Event = WorkerReady | ShardComputed | WorkerGone | WorkFailed


class WorkerPool(Protocol):
    """Workers that compute shards, each one at a time. For one thread, except for `wake`.

    A worker that was started reports `WorkerReady`, `WorkFailed` or `WorkerGone`. Nothing else reports that a
    worker hangs; its owner kills it.
    """

    @property
    def capacity(self) -> int:
        """The number of workers that there may be now; it changes as machines join and leave."""

    def start_worker(self) -> WorkerId:
        """Begin to start a worker."""

    def submit(self, worker: WorkerId, shard: Shard) -> None:
        """Give a shard to a worker that is ready and has none. Never blocks."""

    def kill(self, worker: WorkerId) -> None:
        """End a worker at once. It reports nothing more. Idempotent."""

    def wait(self, timeout_seconds: float) -> Sequence[Event]:
        """Return what has happened, as soon as anything has; nothing after the timeout or after `wake`."""

    def wake(self) -> None:
        """Have `wait` return soon. Thread-safe."""

    def close(self) -> None:
        """Kill all workers and release everything. Idempotent."""
