"""Datasets in folders written by `tf.data.Dataset.save`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from understudy.checkpoints.signature import Signature
from understudy.evaluator.datasets.experiment_datasets import ExperimentDataset
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.library_errors import first_line
from understudy.evaluator.types import Batch

_MARKS = ("dataset_spec.pb", "snapshot.metadata")


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder has the layout of `tf.data.Dataset.save`."""
    return any((path / mark).is_file() for mark in _MARKS)


def load_saved(name: str, folder: Path) -> SavedDataset:
    """Open a folder of single examples ``(x, y)`` or ``(x, y, sample_weight)``; see `ExperimentDataset`.

    Raises:
        ConfigurationError: It is damaged, or is not a valid dataset.
    """
    import tensorflow as tf

    try:
        examples = tf.data.Dataset.load(str(folder))
        for _ in examples:
            pass
    except (tf.errors.OpError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"dataset {name!r}: {folder} cannot be read as tf.data.Dataset.save writes it ({first_line(error)}); save "
            "it again"
        ) from error
    return SavedDataset(name, examples, folder)


class SavedDataset(ExperimentDataset):
    """A dataset that is read from a folder for each evaluation. Its digest covers all files.

    Args:
        name: Its name.
        examples: The loaded dataset.
        folder: The folder.

    Raises:
        ConfigurationError: The name is not a valid folder name, the elements have another structure, or there are
            none.
    """

    def __init__(self, name: str, examples: object, folder: Path) -> None:
        super().__init__(name, examples)
        self._folder = folder
        self.digest = _digest_of(folder)

    def batches(self, signature: Signature, batch_size: int) -> Iterator[Batch]:
        """See `EvaluationDataset`."""
        import tensorflow as tf

        try:
            yield from super().batches(signature, batch_size)
        except tf.errors.OpError as error:
            raise ConfigurationError(
                f"dataset {self.name!r}: {self._folder} was changed or damaged since it was opened: {first_line(error)}"
            ) from error


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()}:{content}\n".encode())
    return digest.hexdigest()
