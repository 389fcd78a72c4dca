from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from understudy.experiments import ExperimentError
from understudy.experiments.records import RecordExamples, record_examples


def write(path: Path, numbers: range, compression: str = "") -> Path:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for number in numbers:
            writer.write(str(number).encode())
    return path


def parse(record: tf.Tensor) -> Any:
    number = tf.strings.to_number(record, tf.int64)
    return number, number * 10


def files_of(folder: Path, compression: str = "") -> list[Path]:
    return [write(folder / f"{first}", range(first, first + 5), compression) for first in range(0, 20, 5)]


def read(dataset: tf.data.Dataset) -> list[int]:
    return [int(record) for record in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_records_are_counted_and_parsed(tmp_path: Path, compression: str) -> None:
    data = record_examples(files_of(tmp_path, compression), parse, compression=compression)
    assert data.size == 20
    assert data.element_spec == (tf.TensorSpec((), tf.int64),) * 2
    dataset = data.dataset()
    assert int(dataset.cardinality()) == 20
    assert [(int(x), int(y)) for x, y in dataset.as_numpy_iterator()] == [(n, n * 10) for n in range(20)]


def test_files_are_taken_up_in_the_order_asked_for(tmp_path: Path) -> None:
    data = record_examples(files_of(tmp_path), parse)
    order = tf.constant([2, 0, 3, 1], tf.int64)
    records = read(data.records(order))
    assert records == read(data.records(order))
    assert records[:5] == [10, 11, 12, 13, 14]
    assert sorted(records) == list(range(20))


def test_a_wrong_number_of_records_is_an_error_when_it_shows(tmp_path: Path) -> None:
    data = record_examples(files_of(tmp_path), parse, size=21)
    with pytest.raises(tf.errors.FailedPreconditionError, match="21 elements but contained only 20"):
        read(data.records(tf.range(4, dtype=tf.int64)))


@pytest.mark.parametrize(
    ("names", "message"), [((), "does the pattern match any"), (("none",), "cannot be read.*none")]
)
def test_files_that_are_not_there_are_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        record_examples([tmp_path / name for name in names], parse)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "torn", range(100))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ExperimentError, match="1 files cannot be read: truncated record"):
        record_examples([path], parse)


def test_what_is_returned_is_plain(tmp_path: Path) -> None:
    data = record_examples(files_of(tmp_path), parse)
    assert isinstance(data, RecordExamples)
    assert data.mean_bytes == (10 * 17 + 10 * 18) // 20
