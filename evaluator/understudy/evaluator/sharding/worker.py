"""A worker: loads a model and opens a dataset once, then computes one shard after another.

Run as a program, it is the process of a worker of `understudy.evaluator.sharding.local_pool`, with a socket as standard
input.
"""

from __future__ import annotations

import itertools
import math
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.evaluator.datasets.dataset import ArrayDataset, SeekableDataset
from understudy.evaluator.evaluator_errors import ConfigurationError, EvaluatorError, exhausted_resource
from understudy.evaluator.sharding.platform_facts import platform_facts
from understudy.evaluator.sharding.pool import ComputedBatch, Facts, Shard, ShardResult
from understudy.evaluator.sharding.work import Work, is_loaded_alike, load_slot, open_data
from understudy.evaluator.types import Batch
from understudy.experiments import ExperimentError


class ShardWorker:
    """See the module. For one thread.

    Args:
        work: What to compute.

    Raises:
        Exception: The model cannot be loaded, or the data cannot be read; see `is_permanent`.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._slot = load_slot(work)  # first, as it lays out the devices
        self._dataset: SeekableDataset = open_data(work.data)
        self._warm_up()

    def change(self, work: Work) -> None:
        """Compute something else from now on. After an error this worker cannot be used.

        What both have in common is not loaded again: the model, its variables for other weights of the same model, and
        data that are held in memory.

        Raises:
            Exception: See `ShardWorker`.
        """
        former, self._work = self._work, work
        if not is_loaded_alike(former, work):
            self._slot = load_slot(work)
        elif former.model.digest != work.model.digest:
            self._slot = load_slot(work, self._slot)
        is_known = former.data == work.data and bool(work.data.digest)
        if not (is_known and isinstance(self._dataset, ArrayDataset)):
            self._dataset = open_data(work.data)
        self._warm_up()

    def _warm_up(self) -> None:
        self._slot.warm_up()
        self.facts: Facts = platform_facts(self._slot.devices[0].partition(":")[0], self._work.threads)

    def compute(self, shard: Shard) -> ShardResult:
        """Return the batches of a shard.

        Raises:
            Exception: The data do not fit the model, or cannot be read; see `is_permanent`.
        """
        size = self._work.batch_size
        batches = self._dataset.batches(self._slot.signature, size, first_example=shard.first_example)
        computed = [self._compute(batch) for batch in itertools.islice(batches, math.ceil(shard.examples / size))]
        examples = sum(len(next(iter(batch.outputs.values()))) for batch in computed)
        if examples != shard.examples:
            raise ConfigurationError(
                f"dataset {self._work.data.name!r} gave {examples} examples from {shard.first_example} on; expected "
                f"{shard.examples}: its files must not change while they are read"
            )
        return computed

    def _compute(self, batch: Batch) -> ComputedBatch:
        self._slot.check_inputs(batch.inputs)
        outputs, masks = self._slot.compute(batch.inputs)
        columns = {name: array for name, array in batch.inputs.items() if name in self._work.columns}
        return ComputedBatch(
            outputs=outputs,
            masks=masks,
            targets=batch.targets,
            sample_weights=batch.sample_weights,
            features={**columns, **batch.features},
        )


def is_permanent(error: Exception) -> bool:
    """Whether every worker would find this error; all others end the worker, and its shard is computed by another."""
    known = isinstance(error, EvaluatorError | ExperimentError | CheckpointError)
    return known and exhausted_resource(error) is None


def serve(connection: Connection[Any, Any]) -> None:
    """Receive the work, then shards, and send the facts, then ``(index, result)``, or an error.

    Returns when the other side has closed the connection.
    """
    try:
        worker = ShardWorker(connection.recv())
        connection.send(worker.facts)
        while True:
            shard = connection.recv()
            connection.send((shard.index, worker.compute(shard)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        if not is_permanent(error):
            raise
        connection.send(error)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's, for the group; the owner ends its workers
        signal.signal(number, signal.SIG_IGN)
    serve(Connection(sys.stdin.fileno()))
