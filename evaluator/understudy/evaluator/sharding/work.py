"""What workers compute: a checkpoint's outputs for a dataset, described so that another process can do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.evaluator.datasets.dataset import ExperimentDataset, SeekableDataset
from understudy.evaluator.datasets.dataset_files import RecordDataset, RemoteRecords, open_files
from understudy.evaluator.evaluator_errors import ConfigurationError, LoadError, exhausted_resource
from understudy.evaluator.model.devices import DeviceSettings, build_strategy
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.sharding.pool import Shard
from understudy.evaluator.sharding.schedule import WorkerTimeouts
from understudy.experiments import load_experiment
from understudy.experiments.experiment_data import evaluation_data

BATCHES_PER_SHARD = 16
"""Each shard costs some milliseconds of its own, and is what is lost when a worker dies."""

_LEAST_FETCH_SECONDS = 30.0
_SLOW_BYTES_PER_SECOND = 2**22
"""A shard whose file may have to be fetched first is not given to another worker before."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A checkpoint in a private folder.

    Attributes:
        folder: The folder of a `understudy.checkpoints.local_checkpoint.LocalCheckpoint`.
        digest: Its digest.
        experiment: Builds the model of a checkpoint that holds only variables; None if it holds its model.
        allow_unsafe_models: Whether the model may name any class, function and operation.
    """

    folder: Path
    digest: str
    experiment: str | None = None
    allow_unsafe_models: bool = False


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset that every worker can read.

    Attributes:
        name: Its name.
        paths: Its files, under the same paths or URLs for every worker; see `open_files`.
        experiment: Instead of files, the experiment that has the dataset of this name.
        features: The names of features that slices need and the model may not take.
        inputs_only: Whether only the inputs of the model are read, so that there need be no targets.
        digest: What its first reader found; empty for the first one.
        records: What its first reader found in TFRecord files at URLs, so that others do not read all of them; None for
            the first one, and for other files.
    """

    name: str
    paths: tuple[Path | str, ...] = ()
    experiment: str | None = None
    features: frozenset[str] = frozenset()
    inputs_only: bool = False
    digest: str = ""
    records: RemoteRecords | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything that a worker has to know besides its shards.

    Attributes:
        model: The checkpoint.
        data: The dataset.
        batch_size: The number of examples of each batch but the last.
        columns: The inputs of the model that come back with its outputs, because slices need them.
        examples_per_pass: The most examples of one call of the model; larger batches run in pieces, as they do in a
            server, because the last digits of the outputs may depend on it. None for whole batches.
        threads: The number of threads within one operation, on which the last digits of the outputs may depend; None
            for TensorFlow's choice.
    """

    model: ModelSource
    data: DataSource
    batch_size: int
    columns: frozenset[str] = frozenset()
    examples_per_pass: int | None = None
    threads: int | None = None


def is_loaded_alike(work: Work, other: Work) -> bool:
    """Whether a slot for some work could hold the model of other work, as far as their descriptions tell."""
    described = replace(other.model, folder=work.model.folder, digest=work.model.digest) == work.model
    names = ("batch_size", "examples_per_pass", "threads")
    return described and all(getattr(work, name) == getattr(other, name) for name in names)


def load_slot(work: Work, former: Slot | None = None) -> Slot:
    """Build the model on the default devices of this process, after all checks that the service makes.

    Args:
        work: Describes the model.
        former: The slot of work that `is_loaded_alike`, which is used again if it takes the checkpoint. It must not be
            used for anything else.

    Raises:
        LoadError: It cannot be built, or is not the checkpoint that was described.
        DeviceError: TensorFlow is already running with other devices.
    """
    strategy = build_strategy(DeviceSettings(intra_op_threads=work.threads))
    try:
        checkpoint = open_local_checkpoint(work.model.folder)
    except (OSError, CheckpointError) as error:
        raise LoadError(f"the checkpoint in {work.model.folder} cannot be read: {error}") from error
    if checkpoint.digest != work.model.digest:
        raise LoadError(f"{work.model.folder} holds another checkpoint than when the computation began; start it again")
    build_model = None if work.model.experiment is None else load_experiment(work.model.experiment).build_model
    loader = loader_for(checkpoint.kind, build_model, allow_unsafe_models=work.model.allow_unsafe_models)
    if former is not None and former.architecture == loader.architecture_of(checkpoint.model_file):
        try:
            former.load(checkpoint.model_file)
        except LoadError as error:
            if exhausted_resource(error) is not None:
                raise
        else:
            return former
    examples = min(work.batch_size, work.examples_per_pass or work.batch_size)
    return Slot(strategy, checkpoint.model_file, max_batch_size=examples, loader=loader)


def open_data(source: DataSource) -> SeekableDataset:
    """Open the dataset.

    Raises:
        ConfigurationError: It cannot be read, or differs from what was described.
    """
    dataset = _opened(source)
    if source.digest not in {"", dataset.digest}:
        origin = source.experiment or ", ".join(map(str, source.paths))
        raise ConfigurationError(
            f"dataset {source.name!r}: this worker reads other examples from {origin} than the process that began; "
            "give all of them the same files"
        )
    return dataset


def described(source: DataSource, dataset: SeekableDataset) -> DataSource:
    """Return a dataset's description for workers, after this process has opened it."""
    records = dataset.remote if isinstance(dataset, RecordDataset) else None
    return replace(source, digest=dataset.digest, records=records)


def timeouts_for(source: DataSource) -> WorkerTimeouts | None:
    """Return how long workers may take that fetch files at URLs for a shard; None for the usual time."""
    if source.records is None:
        return None
    largest = max(file.status.size_bytes for file in source.records.files)
    seconds = _LEAST_FETCH_SECONDS + largest / _SLOW_BYTES_PER_SECOND
    return WorkerTimeouts(least=seconds, first=max(seconds, WorkerTimeouts.first))


def _opened(source: DataSource) -> SeekableDataset:
    if source.records is not None:
        return RecordDataset(
            source.name,
            source.records.files,
            features=source.features,
            inputs_only=source.inputs_only,
            known=source.records,
        )
    if source.experiment is None:
        return open_files(source.name, source.paths, features=source.features, inputs_only=source.inputs_only)
    examples = evaluation_data(load_experiment(source.experiment)).get(source.name)
    if examples is None:
        raise ConfigurationError(f"the experiment {source.experiment} of this worker has no dataset {source.name!r}")
    return ExperimentDataset(source.name, examples, features=source.features)


def shards_of(examples: int, batch_size: int, *, batches: int = BATCHES_PER_SHARD) -> Sequence[Shard]:
    """Return the shards of a dataset.

    Args:
        examples: The number of examples of the dataset.
        batch_size: The number of examples of each batch but the last.
        batches: The number of batches of each shard but the last.
    """
    size = batch_size * batches
    return [
        Shard(index=index, first_example=index * size, examples=min(size, examples - index * size))
        for index in range(math.ceil(examples / size))
    ]


def count_of(dataset: SeekableDataset, slot: Slot, work: Work) -> int:
    """Return the number of examples, which takes a pass over a dataset that does not know it."""
    if dataset.examples is not None:
        return dataset.examples
    return sum(batch.examples for batch in dataset.batches(slot.signature, work.batch_size))
