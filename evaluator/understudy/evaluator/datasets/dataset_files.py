"""Datasets in files that an operator names on the command line: ``.npz``, TFRecord, and `tf.data.Dataset.save`.

A TFRecord file holds one `tf.train.Example` for each example. A feature has the name of the model's input or output
(``x`` for a single input, ``y`` for a single output), or is ``sample_weight``. It holds one of:

- numbers (``int64_list``, ``float_list``): the values of the example's tensor, the last axis varying fastest. An input
  has the shape in the model's signature, and so has a target with as many values as the output. A target of one value
  is a scalar, such as a class index; any other is a vector.
- ``bytes_list``, for a string tensor of the model: the strings, shaped in the same way.
- ``bytes_list``, for a feature that a slice needs and the model does not take: one string.
- ``bytes_list``, for any other tensor: one tensor of any dtype and shape, serialised with `tf.io.serialize_tensor`.

Features whose names begin with ``request/`` are what `--request-log` knows of a request; only slices read them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset import (
    EvaluationDataset,
    ExperimentDataset,
    arrange,
    checked_name,
    columns_of_arrays,
    load_npz,
)
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError, first_line
from understudy.evaluator.settings import check_exists
from understudy.evaluator.types import Array, Batch
from understudy.experiments.example_arrays import input_keys, target_keys, tensor_of

_MARKS = ("dataset_spec.pb", "snapshot.metadata")
_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_GZIP = ".gz"

REQUEST_PREFIX = "request/"
"""Begins the names of features that describe a logged request; see `understudy.evaluator.datasets.request_records`."""


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder has the layout of `tf.data.Dataset.save`."""
    return any((path / mark).is_file() for mark in _MARKS)


def load_saved(name: str, folder: Path, *, features: Collection[str] = ()) -> SavedDataset:
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
    return SavedDataset(name, examples, folder, features=features)


class SavedDataset(ExperimentDataset):
    """A dataset that is read from a folder for each evaluation. Its digest covers all files.

    Args:
        name: Its name.
        examples: The loaded dataset.
        folder: The folder.
        features: See `ExperimentDataset`.

    Raises:
        ConfigurationError: The name is not a valid folder name, the elements have another structure, or there are
            none.
    """

    def __init__(self, name: str, examples: object, folder: Path, *, features: Collection[str] = ()) -> None:
        super().__init__(name, examples, features=features)
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


def find_records(path: Path) -> list[Path]:
    """Return the TFRecord files at a path: the file itself, or those in the folder, sorted by name."""
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in candidates if file.name.removesuffix(_GZIP).endswith(_SUFFIXES)]


class RecordDataset:
    """A dataset in TFRecord files, which are read for each evaluation. See `EvaluationDataset`.

    Args:
        name: Its name.
        files: The files in order, compressed if they end in ``.gz``.
        features: The names of features that slices need and the model may not take.

    Raises:
        ConfigurationError: The name is not a valid folder name, a file is damaged, or there is no example.
    """

    def __init__(self, name: str, files: Sequence[Path], *, features: Collection[str] = ()) -> None:
        self.name = checked_name(name)
        self._features = frozenset(features)
        self._files = tuple(files)
        digest, examples = hashlib.sha256(), 0
        self.columns: frozenset[str] | None = None
        for record in self._records():
            self.columns = self.columns if examples else _columns_of(record)
            digest.update(hashlib.sha256(record).digest())
            examples += 1
        if not examples:
            raise ConfigurationError(f"dataset {name!r} is empty; give at least one example")
        self.examples: int | None = examples
        self.digest = digest.hexdigest()

    def batches(self, signature: Signature, batch_size: int) -> Iterator[Batch]:
        """See `EvaluationDataset`."""
        records = self._records()
        while chunk := list(itertools.islice(records, batch_size)):
            examples = [self._decode(record, signature) for record in chunk]
            columns = {key: self._column(key, examples) for key in examples[0]}
            yield arrange(self.name, columns, signature, features=self._features)

    def _records(self) -> Iterator[bytes]:
        return read_records(f"dataset {self.name!r}", self._files)

    def _decode(self, record: bytes, signature: Signature) -> dict[str, Array]:
        import tensorflow as tf
        from google.protobuf.message import DecodeError

        try:
            features = tf.train.Example.FromString(record).features.feature
            return {
                key: value_of(feature, key, signature, strings=self._features)
                for key, feature in features.items()
                if key in self._features or not key.startswith(REQUEST_PREFIX)
            }
        except (DecodeError, ValueError, TypeError) as error:
            raise InvalidInputError(
                f"dataset {self.name!r}: a record cannot be read: {first_line(error)}; see "
                "understudy.evaluator.datasets.dataset_files for what features hold"
            ) from error

    def _column(self, key: str, examples: Sequence[dict[str, Array]]) -> Array:
        """Stack the values of one feature, ``[examples, ...]``."""
        try:
            return np.stack([example[key] for example in examples])
        except KeyError as error:
            raise InvalidInputError(f"dataset {self.name!r}: feature {key!r} is not in every record") from error
        except ValueError as error:
            shapes = sorted({example[key].shape for example in examples})
            raise InvalidInputError(
                f"dataset {self.name!r}: feature {key!r} has the shapes {shapes} in one batch; expected one shape"
            ) from error


def _columns_of(record: bytes) -> frozenset[str] | None:
    """Return the names of a record's features; see `EvaluationDataset.columns`."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError:  # `RecordDataset.batches` refuses it
        return None
    return columns_of_arrays(
        {
            key: len(getattr(value, value.WhichOneof("kind") or "bytes_list").value) == 1
            for key, value in features.items()
        }
    )


def read_records(origin: str, files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the records of TFRecord files in their order.

    Args:
        origin: What the files are, for errors.
        files: The files, compressed if they end in ``.gz``.

    Raises:
        ConfigurationError: A file is damaged.
    """
    import tensorflow as tf

    for file in files:
        compression = "GZIP" if file.suffix == _GZIP else ""
        try:
            yield from tf.data.TFRecordDataset(str(file), compression_type=compression).as_numpy_iterator()
        except tf.errors.OpError as error:
            raise ConfigurationError(
                f"{origin}: {file} is not a whole TFRecord file ({first_line(error)}); write it again"
            ) from error


def value_of(feature: Any, key: str, signature: Signature, *, strings: Collection[str] = ()) -> Array:
    """Return one example's value of a feature.

    Args:
        feature: The feature.
        key: Its name.
        signature: The signature of the model.
        strings: The names of features whose bytes are strings if the model does not take them.

    Raises:
        ValueError: It does not fit the tensor of the model.
    """
    import tensorflow as tf

    kind = feature.WhichOneof("kind")
    if kind is None:
        raise ValueError(f"feature {key!r} is empty")
    values = getattr(feature, kind).value
    if kind == "bytes_list" and not _holds_strings(key, signature, strings):
        if len(values) != 1:
            raise ValueError(f"feature {key!r} has {len(values)} byte strings, expected one serialised tensor")
        tensor: Array = tf.make_ndarray(tf.make_tensor_proto(0).FromString(values[0]))
        return tensor
    dtype = {"bytes_list": object, "float_list": np.float32, "int64_list": np.int64}[kind]
    return np.array(values, dtype).reshape(_example_shape(len(values), key, signature))


def _holds_strings(key: str, signature: Signature, strings: Collection[str]) -> bool:
    spec = _input_of(key, signature) or _output_of(key, signature)
    return key in strings if spec is None else spec.dtype == "string"


def _input_of(key: str, signature: Signature) -> TensorSpec | None:
    return tensor_of(key, signature.inputs, input_keys(signature.inputs))


def _output_of(key: str, signature: Signature) -> TensorSpec | None:
    return tensor_of(key, signature.outputs, target_keys(signature.inputs, signature.outputs))


def _example_shape(count: int, key: str, signature: Signature) -> tuple[int, ...]:
    """Return the shape of an example's tensor of ``count`` values; -1 stands for one inferred length."""
    spec = _input_of(key, signature)
    if spec is not None:
        return tuple(-1 if length is None else length for length in spec.shape[1:])
    spec = _output_of(key, signature)
    lengths = () if spec is None else tuple(length for length in spec.shape[1:] if length is not None)
    if spec is not None and len(lengths) == len(spec.shape) - 1 and math.prod(lengths) == count:
        return lengths
    return () if count == 1 else (count,)


def open_dataset(name: str, path: Path, *, features: Collection[str] = ()) -> EvaluationDataset:
    """Return a dataset from an ``.npz`` file, TFRecord files, or a folder that `tf.data.Dataset.save` wrote.

    TFRecord files and saved folders are read once from beginning to end to verify and hash them, and again for each
    evaluation; they are never held in memory.

    Args:
        name: The name of the dataset.
        path: The file or folder.
        features: The names of features that slices need and the model may not take; others are refused.

    Raises:
        ConfigurationError: The path does not exist, has another format, or is damaged.
    """
    check_exists(name, path)
    if path.suffix == ".npz":
        return load_npz(name, path, features=features)
    if is_saved_dataset(path):
        return load_saved(name, path, features=features)
    records = find_records(path)
    if records:
        return RecordDataset(name, records, features=features)
    raise ConfigurationError(
        f"dataset {name!r}: {path} has no supported format: give an .npz file, a .tfrecord file (or .tfrecord.gz, or a "
        "folder of them), or a folder written by tf.data.Dataset.save"
    )
