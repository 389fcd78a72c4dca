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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.checkpoints.checkpoint_errors import UnsupportedLocationError
from understudy.checkpoints.remote.reader import RemoteFile, RemoteReader
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.compat.error_texts import first_line
from understudy.evaluator.datasets.dataset import (
    ArrayDataset,
    EvaluationDataset,
    SavedDataset,
    SeekableDataset,
    arrange,
    checked_name,
    columns_of_arrays,
    load_npz,
)
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.settings import check_exists
from understudy.evaluator.types import Array, Batch
from understudy.experiments.example_arrays import EXAMPLE_KEY, input_keys, read_arrays, target_keys, tensor_of
from understudy.experiments.experiment_errors import ExampleError
from understudy.experiments.file_sizes import check_filled, count_records

_MARKS = ("dataset_spec.pb", "snapshot.metadata")
_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_GZIP = ".gz"
_RECORDS = (*_SUFFIXES, *(suffix + _GZIP for suffix in _SUFFIXES))

REQUEST_PREFIX = "request/"
"""Begins the names of features that describe a logged request; see `understudy.evaluator.datasets.request_records`."""


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder has the layout of `tf.data.Dataset.save`."""
    return any((path / mark).is_file() for mark in _MARKS)


def load_saved(name: str, folder: Path, *, features: Collection[str] = ()) -> SavedDataset:
    """Open a folder of single examples ``x``, ``(x, y)`` or ``(x, y, sample_weight)``; see `ExperimentDataset`.

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


def find_records(path: Path) -> list[Path]:
    """Return the TFRecord files at a path: the file itself, or those in the folder, sorted by name."""
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in candidates if _is_records(file.name)]


def _is_records(name: str) -> bool:
    return name.endswith(_RECORDS)


@dataclass(frozen=True, kw_only=True)
class RemoteRecords:
    """What the first reader of TFRecord files at URLs has found.

    Attributes:
        files: The files.
        counts: The number of records of each file.
        columns: See `EvaluationDataset`.
        digest: See `EvaluationDataset`.
    """

    files: tuple[RemoteFile, ...]
    counts: tuple[int, ...]
    columns: frozenset[str] | None
    digest: str


class RecordDataset:
    """A dataset in TFRecord files, which are read for each evaluation. See `EvaluationDataset`.

    Args:
        name: Its name.
        files: The files in order, compressed if they end in ``.gz``.
        features: The names of features that slices need and the model may not take.
        inputs_only: Whether all other features are ignored, so that there need be no targets.
        known: What another process has found in these files, which are then not read at first.

    Raises:
        ConfigurationError: The name is not a valid folder name, a file is damaged or cannot be fetched, or there is no
            example.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[Path | RemoteFile],
        *,
        features: Collection[str] = (),
        inputs_only: bool = False,
        known: RemoteRecords | None = None,
    ) -> None:
        self.name = checked_name(name)
        self._features = frozenset(features)
        self._inputs_only = inputs_only
        self._files = tuple(files)
        self._reader = RemoteReader()
        self._counts: list[int] = [] if known is None else [*known.counts]
        self.columns: frozenset[str] | None = None if known is None else known.columns
        self.examples: int | None = sum(self._counts)
        if known is not None:
            self.digest = known.digest
            return
        digest = hashlib.sha256()
        for file in self._files:
            self._counts.append(0)
            for record in self._records([file]):
                if not any(self._counts):
                    self.columns = _columns_of(record)
                digest.update(hashlib.sha256(record).digest())
                self._counts[-1] += 1
        if not any(self._counts):
            raise ConfigurationError(f"dataset {name!r} is empty; give at least one example")
        self.examples = sum(self._counts)
        self.digest = digest.hexdigest()

    @property
    def remote(self) -> RemoteRecords | None:
        """What other readers need not find again; None if a file is not at a URL."""
        files = tuple(file for file in self._files if isinstance(file, RemoteFile))
        if len(files) < len(self._files):
            return None
        return RemoteRecords(files=files, counts=tuple(self._counts), columns=self.columns, digest=self.digest)

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        """See `SeekableDataset`. Files before the first example are not read."""
        skipped, files = first_example, list(self._files)
        for count in self._counts:
            if skipped < count:
                break
            skipped -= count
            del files[0]
        records = self._records(files, skip=skipped, counts=self._counts[len(self._counts) - len(files) :])
        while chunk := list(itertools.islice(records, batch_size)):
            examples = [self._decode(record, signature) for record in chunk]
            columns = {key: self._column(key, examples) for key in examples[0]}
            yield arrange(self.name, columns, signature, features=self._features, inputs_only=self._inputs_only)

    def _records(
        self, files: Sequence[Path | RemoteFile], *, skip: int = 0, counts: Sequence[int] = ()
    ) -> Iterator[bytes]:
        for index, file in enumerate(files):
            with ExitStack() as stack:
                with _fetch_errors(self.name):
                    path = stack.enter_context(self._reader.opened(file))
                origin = f"dataset {self.name!r}"
                yield from read_records(
                    origin,
                    [path],
                    skip=0 if index else skip,
                    names=[str(file)],
                    count=counts[index] if counts else None,
                )

    def _decode(self, record: bytes, signature: Signature) -> dict[str, Array]:
        import tensorflow as tf
        from google.protobuf.message import DecodeError

        try:
            features = tf.train.Example.FromString(record).features.feature
            return {
                key: value_of(feature, key, signature, strings={*self._features, EXAMPLE_KEY})
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


def read_records(
    origin: str, files: Sequence[Path], *, skip: int = 0, names: Sequence[str] | None = None, count: int | None = None
) -> Iterator[bytes]:
    """Yield the records of TFRecord files in their order, those that are there when a file is opened.

    Args:
        origin: What the files are, for errors.
        files: The files.
        skip: How many records of the first file are left out.
        names: The names of the files, which are compressed if they end in ``.gz``; their paths if None.
        count: The number of records that each file had before; None if it is not known.

    Raises:
        ConfigurationError: A file is damaged or has changed, or a record is too large.
    """
    import tensorflow as tf

    for index, (file, name) in enumerate(zip(files, names or map(str, files), strict=True)):
        is_compressed = name.endswith(_GZIP)
        try:
            found = count_records(file, is_compressed=is_compressed)
            if count not in (None, found):
                raise ConfigurationError(
                    f"{origin}: {name} has {found} records, and had {count} when it was opened; start again to read "
                    "it as it is now, or restore it"
                )
            records = tf.data.TFRecordDataset(str(file), compression_type="GZIP" if is_compressed else "")
            yield from records.take(found).skip(0 if index else skip).as_numpy_iterator()
        except (OSError, ExampleError, tf.errors.OpError) as error:
            raise ConfigurationError(
                f"{origin}: {name} is not a whole TFRecord file ({first_line(error)}); write it again"
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
        message = tf.make_tensor_proto(0).FromString(values[0])
        check_filled(message, len(values[0]), key)
        tensor: Array = tf.make_ndarray(message)
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


def open_files(
    name: str, paths: Sequence[Path | str], *, features: Collection[str] = (), inputs_only: bool = False
) -> SeekableDataset:
    """Return one dataset from several ``.npz`` files, from several TFRecord files, or from one saved folder.

    Args:
        name: The name of the dataset.
        paths: The files or their URLs in the order of their examples; folders of TFRecord files stand for these.
        features: See `open_dataset`.
        inputs_only: Whether only the inputs of the model are read, so that there need be no targets.

    Raises:
        ConfigurationError: A path does not exist, has another format or is damaged, or the formats are mixed, or a URL
            cannot be read.
    """
    saved = paths[0] if len(paths) == 1 else None
    if isinstance(saved, Path) and is_saved_dataset(saved):
        return load_saved(name, saved, features=features)
    arrays = (".npz", ".npy") if inputs_only else (".npz",)
    reader = RemoteReader()
    found = [file for path in paths for file in _found(name, path, arrays, reader)]
    if all(_is_records(file.name) for file in found):
        return RecordDataset(name, found, features=features, inputs_only=inputs_only)
    if all(file.name.endswith(arrays) for file in found):
        return ArrayDataset(name, _joined(name, found, reader), features=features, inputs_only=inputs_only)
    raise ConfigurationError(
        f"dataset {name!r}: {', '.join(map(str, paths))} cannot be read as one dataset: give "
        f"{' or '.join(sorted(arrays))} files, .tfrecord files (or .tfrecord.gz, or folders of them), or one folder "
        "written by tf.data.Dataset.save"
    )


def _found(name: str, path: Path | str, arrays: tuple[str, ...], reader: RemoteReader) -> Sequence[Path | RemoteFile]:
    """Return the files at a path or URL: that of a folder stands for its TFRecord files, if it has some."""
    if isinstance(path, Path):
        check_exists(name, path)
        return find_records(path) or [path]
    with _fetch_errors(name):
        found = [file for file in reader.find(path, (*arrays, *_RECORDS)) if file.url == path or _is_records(file.name)]
    if not found:
        raise ConfigurationError(
            f"dataset {name!r}: there are no TFRecord files in {path}; give their folder, or the URL of one file that "
            f"ends in {', '.join((*arrays, *_RECORDS))}"
        )
    return found


@contextmanager
def _fetch_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnsupportedLocationError) as error:
        raise ConfigurationError(f"dataset {name!r}: {error}") from error


def _arrays_of(name: str, file: Path | RemoteFile, reader: RemoteReader) -> dict[str, Array]:
    try:
        with _fetch_errors(name), reader.opened(file) as path:
            return read_arrays(path, name=str(file))
    except ExampleError as error:
        raise ConfigurationError(f"dataset {name!r}: {error}") from error


def _joined(name: str, files: Sequence[Path | RemoteFile], reader: RemoteReader) -> dict[str, Array]:
    """Return the arrays of all files, joined along axis 0."""
    parts = [_arrays_of(name, file, reader) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part.keys() != parts[0].keys():
            raise ConfigurationError(
                f"dataset {name!r}: {file} has the arrays {sorted(part)}, {files[0]} has {sorted(parts[0])}; all files "
                "need the same"
            )
    try:
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    except ValueError as error:
        raise ConfigurationError(f"dataset {name!r}: the arrays of the files cannot be joined: {error}") from error


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
