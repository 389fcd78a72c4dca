"""Opens the datasets that an operator names on the command line, by the kind of file."""

from __future__ import annotations

from pathlib import Path

from understudy.evaluator.datasets.dataset import EvaluationDataset, load_npz
from understudy.evaluator.datasets.saved_dataset import is_saved_dataset, load_saved
from understudy.evaluator.datasets.tfrecord_dataset import RecordDataset, find_records
from understudy.evaluator.evaluator_errors import ConfigurationError


def open_dataset(name: str, path: Path) -> EvaluationDataset:
    """Return a dataset from an ``.npz`` file, TFRecord files, or a folder that `tf.data.Dataset.save` wrote.

    TFRecord files and saved folders are read once from beginning to end to verify and hash them, and again for each
    evaluation; they are never held in memory.

    Raises:
        ConfigurationError: The path does not exist, has another format, or is damaged.
    """
    if not path.exists():
        raise ConfigurationError(f"dataset {name!r}: there is no file {path}")
    if path.suffix == ".npz":
        return load_npz(name, path)
    if is_saved_dataset(path):
        return load_saved(name, path)
    records = find_records(path)
    if records:
        return RecordDataset(name, records)
    raise ConfigurationError(
        f"dataset {name!r}: {path} has no supported format: give an .npz file, a .tfrecord file (or .tfrecord.gz, or a "
        "folder of them), or a folder written by tf.data.Dataset.save"
    )
