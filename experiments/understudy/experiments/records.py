"""Training data in TFRecord files larger than memory.

    def training_data(self):
        return record_examples(sorted(glob.glob("train-*.tfrecord")), parse)

Every epoch, the trainer shuffles the order of the files, reads several at once, and shuffles records in a buffer of
``--shuffle-buffer`` before they are parsed. So write the examples into many files (but not tiny ones), and do not sort
them by label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from understudy.experiments.experiment_errors import ExperimentError

_FILES_AT_ONCE = 8  # determines the order of examples, so it is not tuned
_RECORDS_IN_A_ROW = 16


@dataclass(frozen=True, kw_only=True)
class RecordExamples:
    """Examples in TFRecord files. Use `record_examples` to create it.

    Attributes:
        files: The files.
        size: Number of records in them.
        parse: Maps one record, a string ``[]``, to an example ``(x, y)`` or ``(x, y, sample_weight)``.
        compression: Compression of the files: ``""``, ``"GZIP"`` or ``"ZLIB"``.
        element_spec: The spec of an example.
        mean_bytes: Mean size of a serialized record.
    """

    files: tuple[str, ...]
    size: int
    parse: Callable[[tf.Tensor], Any]
    compression: str
    element_spec: Any
    mean_bytes: int

    def dataset(self) -> tf.data.Dataset:
        """Return the examples in the order of the files, as for `Experiment.evaluation_data`."""
        records = tf.data.TFRecordDataset(self.files, self.compression)
        examples = records.map(self.parse, num_parallel_calls=tf.data.AUTOTUNE)
        return examples.apply(tf.data.experimental.assert_cardinality(self.size))

    def records(self, order: tf.Tensor) -> tf.data.Dataset:
        """Return the serialized records, several files interleaved.

        Args:
            order: The order of the files: their numbers, int64 ``[files]``.
        """
        names = tf.data.Dataset.from_tensor_slices(tf.gather(tf.constant(self.files), order))
        records = names.interleave(
            lambda name: tf.data.TFRecordDataset(name, self.compression),
            cycle_length=_FILES_AT_ONCE,
            block_length=_RECORDS_IN_A_ROW,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        return records.apply(tf.data.experimental.assert_cardinality(self.size))


def record_examples(
    files: Sequence[str | Path],
    parse: Callable[[tf.Tensor], Any],
    *,
    size: int | None = None,
    compression: str = "",
) -> RecordExamples:
    """Return the examples in TFRecord files.

    Args:
        files: The files, in the same order in every process; any path that TensorFlow reads, ``gs://`` too.
        parse: Maps one record, a string ``[]``, to an example; made of TensorFlow operations, such as
            `tf.io.parse_single_example`.
        size: Number of records in the files; if None, counted by reading them once. Training fails if it is
            wrong.
        compression: Compression of the files: ``""``, ``"GZIP"`` or ``"ZLIB"``.

    Raises:
        ExperimentError: There is no file, or one cannot be read.
    """
    names = tuple(str(name) for name in files)
    if not names:
        raise ExperimentError("record_examples() was given no files; does the pattern match any?")
    element_spec = tf.data.Dataset.from_tensors(b"").map(parse).element_spec
    size = _count(names, compression) if size is None else size
    return RecordExamples(
        files=names,
        size=size,
        parse=parse,
        compression=compression,
        element_spec=element_spec,
        mean_bytes=sum(tf.io.gfile.stat(name).length for name in names) // max(1, size),
    )


def _count(files: Sequence[str], compression: str) -> int:
    records = tf.data.TFRecordDataset(files, compression, num_parallel_reads=tf.data.AUTOTUNE)
    try:
        return int(records.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1))
    except tf.errors.OpError as error:
        reason = error.message.rpartition("}} ")[2].partition(" [Op:")[0]
        raise ExperimentError(f"the records of {len(files)} files cannot be read: {reason}") from error
