"""Computes the outputs of a served run's checkpoints on a cluster, for the evaluation of its datasets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.dataset_scorer import ComputedOutputs
from understudy.evaluator.evaluator_errors import ClusterError, ConfigurationError, LoadError
from understudy.evaluator.observer import Observer
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.sharding.cluster_pool import ClusterPool
from understudy.evaluator.sharding.coordinator import ShardCoordinator
from understudy.evaluator.sharding.evaluate import received
from understudy.evaluator.sharding.schedule import ShardingError
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work, shards_of
from understudy.evaluator.types import Batch

_OF_THE_CLUSTER = (ShardingError, ConfigurationError, LoadError, CheckpointError)
"""What workers report about themselves and what they read there: this process has loaded the same without an error."""

_REST_SECONDS = 300.0
"""How long workers without work are kept, with the memory of a model and a dataset each."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster, and how its nodes read what they compute.

    Attributes:
        address: Its address.
        data: The paths of the datasets in files, by their names; the others are the experiment's.
        experiment: Has datasets, and builds the model of checkpoints that hold only variables; None if there is none.
    """

    address: str
    data: Mapping[str, Path]
    experiment: str | None = None

    def source(self, dataset: str) -> DataSource:
        """Return where the nodes read a dataset."""
        if dataset in self.data:
            return DataSource(name=dataset, paths=(self.data[dataset],))
        return DataSource(name=dataset, experiment=self.experiment)


class ClusterScoring:
    """See `understudy.evaluator.evaluation.dataset_scorer.OutputSource`. Thread-safe.

    The connection and the workers are kept for the next dataset or checkpoint, as a new worker takes seconds to import
    TensorFlow, but no longer than some minutes without work, and not after a failure.

    Args:
        cluster: The cluster.
        store: Has the files of the checkpoints.
        observer: Notified of how many nodes there are, and each time that the cluster cannot be used.
        allow_unsafe_models: Whether the nodes may load models that name any class, function and operation.
        examples_per_pass: The most examples of one call of the model in this process.
        threads: The number of threads within one operation; None for TensorFlow's choice.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        store: CheckpointStore,
        observer: Observer,
        allow_unsafe_models: bool,
        examples_per_pass: int,
        threads: int | None,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._observer = observer
        self._allow_unsafe_models = allow_unsafe_models
        self._examples_per_pass = examples_per_pass
        self._threads = threads
        self._lock = threading.Lock()
        self._kept: ClusterPool | None = None
        self._is_closed = False

    @contextmanager
    def computed(
        self,
        servable: Servable,
        dataset: EvaluationDataset,
        *,
        batch_size: int,
        columns: frozenset[str],
        is_wanted: Callable[[], bool],
    ) -> Iterator[ComputedOutputs]:
        """See `OutputSource`."""
        signature = servable.slot.signature
        examples = dataset.examples
        if examples is None:
            examples = sum(batch.examples for batch in dataset.batches(signature, batch_size))
        with self._store.lease(self._store.info(servable.step)) as lease:
            work = Work(
                model=ModelSource(
                    folder=lease.checkpoint.directory,
                    digest=servable.digest,
                    experiment=self._cluster.experiment,
                    allow_unsafe_models=self._allow_unsafe_models,
                ),
                data=replace(self._cluster.source(dataset.name), features=columns, digest=dataset.digest),
                batch_size=batch_size,
                columns=columns,
                examples_per_pass=self._examples_per_pass,
                threads=self._threads,
            )
            with (
                self._borrowed(work) as pool,
                ShardCoordinator(shards_of(examples, batch_size), pool, keeps_pool=True) as coordinator,
            ):
                yield ComputedOutputs(batches=self._received(coordinator, is_wanted), notes=lambda: coordinator.notes)

    def close(self) -> None:
        """Let the workers go. Evaluations that are under way do it at their end."""
        with self._lock:
            self._is_closed, pool, self._kept = True, self._kept, None
        if pool is not None:
            pool.close()

    @contextmanager
    def _borrowed(self, work: Work) -> Iterator[ClusterPool]:
        """Yield the pool that was kept, or a new one, and keep it if nothing fails."""
        pool = self._begun(work)
        try:
            yield pool
        except BaseException:
            pool.close()
            raise
        pool.rest(_REST_SECONDS)
        with self._lock:
            is_kept = self._kept is None and not self._is_closed
            if is_kept:
                self._kept = pool
        if not is_kept:
            pool.close()

    def _begun(self, work: Work) -> ClusterPool:
        with self._lock:
            pool, self._kept = self._kept, None
        if pool is not None:
            try:
                pool.begin(work)
            except ClusterError:  # it was lost or let go meanwhile
                pool.close()
            else:
                return pool
        return ClusterPool(work, address=self._cluster.address, on_nodes=self._observer.cluster_changed)

    def _received(self, coordinator: ShardCoordinator, is_wanted: Callable[[], bool]) -> Iterator[Batch]:
        try:
            yield from received(coordinator, is_wanted)
        except ClusterError:
            self._observer.cluster_failed()
            raise
        except _OF_THE_CLUSTER as error:
            self._observer.cluster_failed()
            raise ClusterError(f"the cluster {self._cluster.address} cannot compute this now: {error}") from error
