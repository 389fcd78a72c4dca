"""Writes a checkpoint's outputs for a dataset, one file a shard, and goes on where an earlier run ended.

The folder holds ``lock``, which the process that writes has locked, ``job.json``, which says what is computed,
``outputs-NNNNNNNN.npz`` for each shard, and in the end ``manifest.json`` with the size and the SHA-256 of each of these
files. A file has its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.checkpoints.atomic import write_bytes, write_json
from understudy.checkpoints.checkpoint_errors import LockHeldError
from understudy.checkpoints.layout import TEMPORARY_PREFIX
from understudy.checkpoints.locks import LOCK_FILE, DirectoryLock
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError, StorageError
from understudy.evaluator.sharding.coordinator import ShardCoordinator
from understudy.evaluator.sharding.evaluate import MakePool
from understudy.evaluator.sharding.pool import Shard, ShardResult
from understudy.evaluator.sharding.progress_file import check_job
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
from understudy.evaluator.types import Progress
from understudy.experiments.example_arrays import portable

JOB_FILE = "job.json"
MANIFEST_FILE = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PredictedFiles:
    """What a finished job has written: the folder, the number of files and examples, and notes on the numbers."""

    folder: Path
    files: int
    examples: int
    notes: tuple[str, ...]


def predict_files(
    work: Work,
    folder: Path,
    *,
    step: int,
    make_pool: MakePool,
    timeouts: WorkerTimeouts | None = None,
    batches_per_shard: int = BATCHES_PER_SHARD,
    progress: Progress | None = None,
) -> PredictedFiles:
    """Compute the outputs of all examples and write them; shards that an earlier run has written are not repeated.

    Args:
        work: The checkpoint and the dataset.
        folder: The folder, made if it does not exist.
        step: The step of the checkpoint.
        make_pool: Makes the pool of workers.
        timeouts: How long workers may take.
        batches_per_shard: The number of batches of each shard.
        progress: Called with the examples whose outputs are written; None for no calls.

    Raises:
        ConfigurationError: The folder holds another job or other files, another process writes there, or the data
            cannot be read.
        InvalidInputError: The data do not fit the model, or the outputs of a shard cannot be joined.
        ShardingError: The workers cannot compute a shard.
        StorageError: A file cannot be written.
    """
    dataset = open_data(work.data)
    work = replace(work, data=described(work.data, dataset))
    examples = dataset.examples if dataset.examples is not None else count_of(dataset, load_slot(work), work)
    shards = shards_of(examples, work.batch_size, batches=batches_per_shard)
    job = {
        "format": _FORMAT,
        "step": step,
        "model": work.model.digest,
        "dataset": dataset.digest,
        "examples": examples,
        "batch_size": work.batch_size,
        "batches_per_shard": batches_per_shard,
    }
    with _owned(folder, job), _storage_errors(folder):
        missing = [shard for shard in shards if not (folder / file_of(shard)).exists()]
        done = examples - sum(shard.examples for shard in missing)
        _report(progress, done, examples)
        notes: tuple[str, ...] = ()
        if missing:
            with ShardCoordinator(
                missing, make_pool(work), timeouts=timeouts or timeouts_for(work.data)
            ) as coordinator:
                for shard, result in coordinator.results():
                    write_bytes(folder / file_of(shard), _encoded(shard, result))
                    done += shard.examples
                    _report(progress, done, examples)
                notes = tuple(coordinator.notes)
        files = [_described(folder, shard) for shard in shards]
        write_json(folder / MANIFEST_FILE, {**job, "files": files, "notes": list(notes)})
    return PredictedFiles(folder=folder, files=len(files), examples=examples, notes=notes)


def _report(progress: Progress | None, done: int, examples: int) -> None:
    if progress is not None:
        progress(done, examples)


def file_of(shard: Shard) -> str:
    """Return the name of a shard's file."""
    return f"outputs-{shard.index:08d}.npz"


@contextmanager
def _owned(folder: Path, job: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder for this process, once it is known to hold this job or nothing."""
    file = folder / JOB_FILE
    with ExitStack() as stack:
        with _storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not file.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
                raise ConfigurationError(
                    f"{folder} holds other files; give an empty folder, or one that does not exist"
                )
            try:
                stack.enter_context(DirectoryLock(folder, alternative="wait until it has ended"))
            except LockHeldError as error:
                raise ConfigurationError(str(error)) from error
            if not file.exists():
                write_json(file, job)
            found = json.loads(file.read_bytes())
        check_job(file, found, job)
        for left in folder.glob(f"{TEMPORARY_PREFIX}*"):
            left.unlink()
        yield


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to: {error}; make room there, and start again") from error


def _encoded(shard: Shard, result: ShardResult) -> bytes:
    names = result[0].outputs
    try:
        arrays = {name: np.concatenate([batch.outputs[name] for batch in result]) for name in names}
    except ValueError as error:
        raise InvalidInputError(
            f"the outputs from example {shard.first_example} on cannot be joined, because their shapes differ between "
            f"batches ({error}); pad the inputs to one length"
        ) from error
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{name: portable(array) for name, array in arrays.items()})
    return content.getvalue()


def _described(folder: Path, shard: Shard) -> dict[str, Any]:
    content = (folder / file_of(shard)).read_bytes()
    return {
        "name": file_of(shard),
        "first_example": shard.first_example,
        "examples": shard.examples,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
