"""The datasets that an operator names on the command line, by what lies at the path."""

from __future__ import annotations

from pathlib import Path

from understudy.evaluator.datasets import EvaluationDataset, load_npz
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.saved_dataset import is_saved_dataset, load_saved
from understudy.evaluator.tfrecord_dataset import RecordDataset, find_records


def open_dataset(name: str, path: Path) -> EvaluationDataset:
    """Return a dataset from an ``.npz`` file, TFRecord files, or a folder that `tf.data.Dataset.save` wrote.

    TFRecord files and saved folders are read once from beginning to end, to see that they are whole and to tell them
    from others, and then anew whenever they are scored on; they are never held in memory.

    Raises:
        ConfigurationError: There is nothing, or it is something else, or damaged.
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
        f"dataset {name!r}: {path} is none of what is read: an .npz file, a .tfrecord file (or .tfrecord.gz, or a "
        "folder of them), or a folder written by tf.data.Dataset.save"
    )
