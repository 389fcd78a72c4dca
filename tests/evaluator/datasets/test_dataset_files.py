"""Datasets in TFRecord files and in folders of tf.data."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.datasets.dataset_files import open_dataset
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.types import Array

pytestmark = pytest.mark.usefixtures("logical_cpus")

ROWS = 5
IMAGE = TensorSpec(name="image", dtype="float32", shape=(None, 2, 3))
DIGIT = TensorSpec(name="digit", dtype="float32", shape=(None, 10))
ONE = Signature(inputs=(IMAGE,), outputs=(DIGIT,))
X = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3)
Y = np.arange(ROWS, dtype=np.int64)
W = np.linspace(0.0, 1.0, ROWS, dtype=np.float32)


def numbers(values: Any) -> tf.train.Feature:
    array = np.ravel(values)
    if array.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=array))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array))


def strings(*values: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def serialised(tensor: Any) -> tf.train.Feature:
    return strings(tf.io.serialize_tensor(tensor).numpy())


def write_records(
    file: Path, rows: Iterable[Mapping[str, tf.train.Feature]], *, compression: str | None = None
) -> Path:
    with tf.io.TFRecordWriter(str(file), compression) as writer:
        for row in rows:
            writer.write(tf.train.Example(features=tf.train.Features(feature=row)).SerializeToString())
    return file


def records(tmp_path: Path) -> Path:
    rows = ({"x": numbers(x), "y": numbers(y), "sample_weight": numbers(w)} for x, y, w in zip(X, Y, W, strict=True))
    return write_records(tmp_path / "test.tfrecord", rows)


def compressed_shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for index, part in enumerate((slice(0, 2), slice(2, ROWS))):
        triples = zip(X[part], Y[part], W[part], strict=True)
        rows = ({"image": serialised(x), "digit": serialised(y), "sample_weight": numbers(w)} for x, y, w in triples)
        write_records(folder / f"part-{index}.tfrecord.gz", rows, compression="GZIP")
    return folder


def saved(tmp_path: Path) -> Path:
    tf.data.Dataset.from_tensor_slices((X, Y, W)).save(str(tmp_path / "saved"))
    return tmp_path / "saved"


FORMS: dict[str, Callable[[Path], Path]] = {"records": records, "shards": compressed_shards, "saved": saved}


def columns(dataset: EvaluationDataset, signature: Signature, batch_size: int) -> dict[str, Array]:
    """Return everything a dataset gives, put together."""
    batches = list(dataset.batches(signature, batch_size))
    assert all(batch.examples == batch_size for batch in batches[:-1])
    found: dict[str, list[Array]] = {}
    for batch in batches:
        for name, array in {**batch.inputs, **batch.targets, **batch.sample_weights}.items():
            found.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


@pytest.mark.parametrize("form", FORMS)
def test_examples_come_in_order_and_in_batches_as_often_as_they_are_wanted(tmp_path: Path, form: str) -> None:
    dataset = open_dataset("test", FORMS[form](tmp_path))

    assert (dataset.name, dataset.examples) == ("test", ROWS)
    for _ in range(2):
        found = columns(dataset, ONE, 2)
        assert found["image"].dtype == np.float32
        np.testing.assert_array_equal(found["image"], X)
        np.testing.assert_array_equal(found["targets"], Y)
        np.testing.assert_array_equal(found["sample_weights"], W)


def test_the_same_examples_have_one_identity_and_others_another(tmp_path: Path) -> None:
    def digest(name: str, y: Array) -> str:
        rows = ({"x": numbers(image), "y": numbers(digit)} for image, digit in zip(X, y, strict=True))
        return open_dataset("test", write_records(tmp_path / name, rows)).digest

    assert digest("one.tfrecord", Y) == digest("two.tfrecord", Y) != digest("three.tfrecord", Y[::-1])


def test_the_identity_of_a_saved_folder_is_that_of_its_content(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert open_dataset("a", folder).digest == open_dataset("b", folder).digest
    tf.data.Dataset.from_tensor_slices((X + 1, Y, W)).save(str(tmp_path / "other"))
    assert open_dataset("a", folder).digest != open_dataset("a", tmp_path / "other").digest


def test_lists_take_the_shapes_that_the_model_says(tmp_path: Path) -> None:
    signature = Signature(
        inputs=(
            TensorSpec(name="words", dtype="string", shape=(None, None)),
            TensorSpec(name="count", dtype="float32", shape=(None,)),
        ),
        outputs=(
            TensorSpec(name="map", dtype="float32", shape=(None, 2, 2)),
            TensorSpec(name="score", dtype="float32", shape=(None, 1)),
            TensorSpec(name="kind", dtype="float32", shape=(None, 10)),
        ),
    )
    row = {
        "words": strings(b"to", b"be"),
        "count": numbers(2),
        "map": numbers(np.arange(4.0)),
        "score": numbers(0.5),
        "kind": numbers(7),
    }

    found = columns(open_dataset("test", write_records(tmp_path / "d.tfrecord", [row, row])), signature, 2)

    assert {name: array.shape for name, array in found.items()} == {
        "words": (2, 2),
        "count": (2,),
        "map": (2, 2, 2),
        "score": (2, 1),
        "kind": (2,),
    }
    assert found["words"].tolist() == [[b"to", b"be"]] * 2


def test_records_that_do_not_fit_the_model_say_what_is_wrong(tmp_path: Path) -> None:
    def scored(*rows: Mapping[str, tf.train.Feature]) -> None:
        columns(open_dataset("test", write_records(tmp_path / "d.tfrecord", rows)), ONE, 10)

    whole = {"x": numbers(X[0]), "y": numbers(1)}
    with pytest.raises(InvalidInputError, match=r"unknown to the model: \['z'\]; it takes .* 'digit', 'y'"):
        scored({"x": numbers(X[0]), "z": numbers(1)})
    with pytest.raises(InvalidInputError, match="feature 'y' is not in every record"):
        scored(whole, {"x": numbers(X[0])})
    with pytest.raises(InvalidInputError, match="cannot reshape array of size 5"):
        scored({"x": numbers(np.zeros(5)), "y": numbers(1)})
    with pytest.raises(InvalidInputError, match=r"feature 'y' has the shapes \[\(\), \(3,\)\] in one batch"):
        scored(whole, {"x": numbers(X[0]), "y": numbers([1, 2, 3])})
    with pytest.raises(InvalidInputError, match="a record cannot be read"):
        scored({"x": strings(b"no tensor"), "y": numbers(1)})


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, form: str) -> None:
    path = FORMS[form](tmp_path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)

    with pytest.raises(ConfigurationError, match=f"dataset 'test': {path}"):
        open_dataset("test", path)


def test_what_is_no_dataset_is_refused_and_told_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("1,2")
    with pytest.raises(ConfigurationError, match=r"there is no file .*absent"):
        open_dataset("test", tmp_path / "absent")
    for path in (tmp_path, tmp_path / "d.csv"):
        with pytest.raises(ConfigurationError, match=r"no supported format: give an \.npz file, a \.tfrecord file"):
            open_dataset("test", path)
    with pytest.raises(ConfigurationError, match="is empty"):
        open_dataset("test", write_records(tmp_path / "d.tfrecord", []))


@pytest.mark.parametrize("form", ["records", "saved"])
def test_a_large_dataset_is_never_in_memory_as_a_whole(tmp_path: Path, form: str) -> None:
    rows, width = 1000, 1000
    signature = Signature(inputs=(TensorSpec(name="x", dtype="float32", shape=(None, width)),), outputs=(DIGIT,))
    if form == "saved":
        path = tmp_path / "saved"
        tf.data.Dataset.range(rows).map(lambda index: (tf.fill([width], tf.cast(index, tf.float32)), index)).save(
            str(path)
        )
    else:
        examples = ({"x": numbers(np.full(width, row, np.float32)), "y": numbers(row)} for row in range(rows))
        path = write_records(tmp_path / "d.tfrecord", examples)
    tracemalloc.start()
    try:
        dataset = open_dataset("test", path)
        assert sum(batch.examples for batch in dataset.batches(signature, 25)) == rows
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < rows * width * 4 / 4


def test_a_feature_that_the_model_does_not_take_is_read_for_slices(tmp_path: Path) -> None:
    rows = (
        {"image": serialised(x), "digit": serialised(y), "country": strings(b"FR")} for x, y in zip(X, Y, strict=True)
    )
    file = write_records(tmp_path / "d.tfrecord", rows)
    (batch,) = open_dataset("test", file, features=("country",)).batches(ONE, 100)
    assert batch.features["country"].tolist() == [b"FR"] * ROWS
    with pytest.raises(InvalidInputError, match="a record cannot be read"):
        list(open_dataset("test", file).batches(ONE, 100))
