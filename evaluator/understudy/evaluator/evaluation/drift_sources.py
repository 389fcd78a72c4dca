"""The samples whose drift is computed: an experiment's data, files of examples, and request logs.

Names are those in the data, without a model: a lone input has the name ``x`` where it has none. In TFRecord files that
`--request-log` did not write, a single byte string that is a serialized tensor is read as one, and others as strings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from understudy.compat.error_texts import first_line
from understudy.evaluator.datasets.dataset import SAMPLE_WEIGHTS, TARGETS, as_bytes, parts_of
from understudy.evaluator.datasets.dataset_files import REQUEST_PREFIX, find_records, is_saved_dataset, read_records
from understudy.evaluator.datasets.request_records import ANSWER_PREFIX, redacted_inputs
from understudy.evaluator.evaluation.drift import LONE_INPUT
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.types import Array, Arrays
from understudy.experiments import Experiment
from understudy.experiments.example_arrays import EXAMPLE_KEY, WEIGHT_KEY, read_arrays
from understudy.experiments.experiment_data import evaluation_data, training_data
from understudy.experiments.experiment_errors import ExampleError

TRAINING: Final = "train"
"""The name of an experiment's training data."""

BATCH_SIZE: Final = 256

_TARGET_KEYS: Final = frozenset({"y", TARGETS})
_WEIGHT_KEYS: Final = frozenset({WEIGHT_KEY, SAMPLE_WEIGHTS})
_OF_EXAMPLES: Final = _WEIGHT_KEYS | {EXAMPLE_KEY}
"""What a file says of its examples: their weights and names, which have no distribution to compare."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """A batch of examples: tensors ``[examples, ...]`` by name. ``scores`` are logged answers."""

    inputs: Arrays
    targets: Arrays = field(default_factory=dict)
    scores: Arrays = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(next(iter(chain(self.inputs.values(), self.targets.values(), self.scores.values()))))


def examples_of(text: str, experiment: Experiment | None) -> Iterator[Examples]:
    """Yield the examples that a text names, in batches of at most `BATCH_SIZE`.

    Args:
        text: ``train`` or the name of an evaluation dataset, of the experiment; or the path of an ``.npz`` file, of
            TFRecord files, of a request log, or of a folder that `tf.data.Dataset.save` wrote.
        experiment: The experiment, if there is one.

    Raises:
        ConfigurationError: There is no such data, or it cannot be read.
    """
    if experiment is not None:
        if text == TRAINING:
            return _elements(_as_dataset(training_data(experiment)))
        datasets = evaluation_data(experiment)
        if text in datasets:
            return _elements(datasets[text])
    path = Path(text)
    if not path.exists():
        names = "" if experiment is None else f", and none of {[TRAINING, *evaluation_data(experiment)]}"
        also = "" if experiment is not None else "; --experiment says whose datasets have names"
        raise ConfigurationError(f"{text!r} is no file or folder{names}{also}")
    return _of_path(path)


def _of_path(path: Path) -> Iterator[Examples]:
    if path.suffix == ".npz":
        return _of_npz(path)
    if is_saved_dataset(path):
        import tensorflow as tf

        try:
            return _elements(tf.data.Dataset.load(str(path)))
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {first_line(error)}") from error
    records = find_records(path)
    if not records:
        raise ConfigurationError(
            f"{path} has no supported format: give an .npz file, TFRecord files, a request log, to which "
            "a service writes once a minute, or a tf.data folder"
        )
    return _of_records(path, records)


def _of_npz(path: Path) -> Iterator[Examples]:
    try:
        arrays = {key: as_bytes(array) for key, array in read_arrays(path).items() if key not in _OF_EXAMPLES}
    except ExampleError as error:
        raise ConfigurationError(str(error)) from error
    inputs, targets = _inputs_and_targets(arrays)
    lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(lengths) != 1:
        raise ConfigurationError(f"{path} has arrays of {sorted(lengths)} examples; all need the same number")
    for start in range(0, lengths.pop(), BATCH_SIZE):
        rows = slice(start, start + BATCH_SIZE)
        yield Examples(inputs=_rows(inputs, rows), targets=_rows(targets, rows))


def _rows(arrays: Arrays, rows: slice) -> Arrays:
    return {key: array[rows] for key, array in arrays.items()}


def _as_dataset(examples: Any) -> Any:
    """Return a `tf.data.Dataset` of what `Experiment.training_data` may return."""
    import tensorflow as tf

    return examples if isinstance(examples, tf.data.Dataset) else examples.dataset()


def _elements(dataset: Any) -> Iterator[Examples]:
    import tensorflow as tf

    try:
        for inputs, *rest in map(parts_of, dataset.batch(BATCH_SIZE).as_numpy_iterator()):
            targets = _named(rest[0], TARGETS) if rest else {}
            yield Examples(inputs=_named(inputs, LONE_INPUT), targets=targets)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the examples cannot be read ({first_line(error)}); expected x, (x, y) or (x, y, sample_weight)"
        ) from error


def _named(structure: Any, lone: str) -> dict[str, Array]:
    import keras

    leaves = keras.tree.flatten_with_path(structure)
    return {"/".join(map(str, path)) or lone: np.asarray(leaf) for path, leaf in leaves}


def _of_records(path: Path, files: Sequence[Path]) -> Iterator[Examples]:
    """Group the records in order into batches of the same names and shapes."""
    batch: list[dict[str, Arrays]] = []
    for record in read_records(str(path), files):
        example = _decoded(path, record)
        if batch and (len(batch) == BATCH_SIZE or _form(example) != _form(batch[0])):
            yield _joined(batch)
            batch = []
        batch.append(example)
    if batch:
        yield _joined(batch)


def _form(example: Mapping[str, Arrays]) -> object:
    return {kind: {name: array.shape for name, array in arrays.items()} for kind, arrays in example.items()}


def _joined(batch: Sequence[Mapping[str, Arrays]]) -> Examples:
    return Examples(
        **{
            kind: {name: np.stack([example[kind][name] for example in batch]) for name in arrays}
            for kind, arrays in batch[0].items()
        }
    )


def _decoded(path: Path, record: bytes) -> dict[str, Arrays]:
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError as error:
        raise ConfigurationError(f"{path} holds a record that is no tf.train.Example: {first_line(error)}") from error
    scores = {
        name.removeprefix(ANSWER_PREFIX): _value(feature)
        for name, feature in features.items()
        if name.startswith(ANSWER_PREFIX)
    }
    skipped = {*(_WEIGHT_KEYS if scores else _OF_EXAMPLES), *scores, *redacted_inputs(features)}
    inputs, targets = _inputs_and_targets(
        {
            name: _value(feature)
            for name, feature in features.items()
            if name not in skipped and not name.startswith(REQUEST_PREFIX)
        }
    )
    return {"inputs": inputs, "targets": targets, "scores": scores}


def _inputs_and_targets(arrays: Arrays) -> tuple[Arrays, Arrays]:
    inputs = {name: array for name, array in arrays.items() if name not in _TARGET_KEYS}
    target = next((array for name, array in arrays.items() if name in _TARGET_KEYS), None)
    return inputs, {} if target is None else {TARGETS: target}


def _value(feature: Any) -> Array:
    """Return a feature's value; a lone number or string is a scalar."""
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    if kind == "bytes_list":
        tensor = _tensor(values[0]) if len(values) == 1 else None
        if tensor is not None:
            return tensor
    array = np.array(values, object if kind == "bytes_list" else np.float64)
    return array.reshape(()) if len(values) == 1 else array


def _tensor(content: bytes) -> Array | None:
    """Return a serialized tensor, or None if the bytes are not one."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        array: Array = tf.make_ndarray(tf.make_tensor_proto(0).FromString(content))
    except (DecodeError, TypeError, ValueError):
        return None
    return array


def limited(examples: Iterator[Examples], limit: int) -> Iterator[Examples]:
    """Yield batches until so many examples are reached; the last batch is not cut."""
    seen = 0
    for batch in examples:
        yield batch
        seen += batch.count
        if seen >= limit:
            return
