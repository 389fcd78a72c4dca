"""Logged requests are read back as they were, whatever their dtypes and shapes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset_files import RecordDataset
from understudy.evaluator.datasets.request_records import LoggedRequest, encode_request, read_logged
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.types import Array

DTYPES = ("bool", "uint8", "int8", "int32", "uint64", "int64", "float16", "float32", "float64")


def spec(name: str, array: Array) -> TensorSpec:
    dtype = "string" if array.dtype.kind == "O" else array.dtype.name
    return TensorSpec(name=name, dtype=dtype, shape=(None, *array.shape[1:]))


def logged(inputs: dict[str, Array], outputs: dict[str, Array], **more: Any) -> LoggedRequest:
    known = {"step": 3, "recorded_at": 12.25, "method": "/a.B/C", "caller": "é", **more}
    return LoggedRequest(inputs=inputs, outputs=outputs, **known)


def write(file: Path, *requests: LoggedRequest, **options: Any) -> Path:
    with tf.io.TFRecordWriter(str(file)) as writer:
        for request in requests:
            for record in encode_request(request, **options):
                writer.write(record)
    return file


def check(folder: Path, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
    """Write a request, and read it as a log and as a dataset."""
    file = write(folder / "log.tfrecord", logged(inputs, outputs))
    signature = Signature(
        inputs=tuple(spec(name, array) for name, array in inputs.items()),
        outputs=tuple(spec(name, array) for name, array in outputs.items()),
    )
    examples = list(read_logged([file], signature))
    for name, array in inputs.items():
        same(np.stack([example.inputs[name] for example in examples]), array)
    for name, array in outputs.items():
        same(np.stack([example.answers[name] for example in examples]), array)
    assert {(example.step, example.recorded_at, example.method, example.caller) for example in examples} == {
        (3, 12.25, "/a.B/C", "é")
    }
    (batch,) = RecordDataset("log", [file]).batches(signature, 100)
    for name, array in inputs.items():
        same(batch.inputs[name], array)
    targets = batch.targets if len(outputs) > 1 else {next(iter(outputs)): batch.targets["targets"]}
    for name, array in outputs.items():
        same(targets[name], array)


def same(found: Array, expected: Array) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist() or np.array_equal(found, expected, equal_nan=True)


@settings(max_examples=25)
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(1, 4))
def test_numbers_of_every_dtype_and_shape(data: Any, dtype: str, other: str, examples: int) -> None:
    def draw(dtype: str) -> Array:
        shape = (examples, *data.draw(arrays.array_shapes(min_dims=0, max_dims=3, max_side=3)))
        array: Array = data.draw(arrays.arrays(dtype, shape))
        return array

    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), {"x": draw(dtype), "z": draw(other)}, {"y": draw(other), "w": draw(dtype)})


def test_strings_bfloat16_and_empty_tensors(tmp_path: Path) -> None:
    strings = np.array([[b"a", b"\xff\0", b""], [b"", b"b" * 300, b"\x08\x01"]], object)
    scalars = np.array([b"one", b""], object)
    small = np.array([[1.5], [-2.0]], ml_dtypes.bfloat16)
    check(tmp_path, {"s": strings, "t": scalars, "b": small, "e": np.zeros((2, 0), np.int64)}, {"y": strings})


def test_slices_and_big_endian_arrays_are_written_as_their_values(tmp_path: Path) -> None:
    batch = np.arange(24, dtype=np.float32).reshape(4, 6)[1:3, ::2]
    file = write(tmp_path / "log.tfrecord", logged({"x": batch}, {"y": batch.astype(">f4")}))
    signature = Signature(inputs=(spec("x", batch),), outputs=(spec("y", batch),))
    examples = list(read_logged([file], signature))
    assert [example.inputs["x"].tolist() for example in examples] == batch.tolist()
    assert [example.answers["y"].tolist() for example in examples] == batch.tolist()


def test_targets_may_be_others_than_the_answers(tmp_path: Path) -> None:
    outputs = {"scores": np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)}
    targets = {"scores": np.array([1, 0])}
    file = write(tmp_path / "log.tfrecord", logged({"x": np.zeros(2, np.float32)}, outputs), targets=targets)
    signature = Signature(
        inputs=(TensorSpec(name="x", dtype="float32", shape=(None,)),),
        outputs=tuple(spec(name, array) for name, array in outputs.items()),
    )
    (batch,) = RecordDataset("log", [file]).batches(signature, 10)
    assert batch.targets["targets"].tolist() == [1, 0]
    answers = [example.answers["scores"].tolist() for example in read_logged([file], signature)]
    assert answers == outputs["scores"].tolist()


def test_what_is_known_of_a_request_can_be_a_feature_of_slices(tmp_path: Path) -> None:
    x = np.zeros((2, 1), np.float32)
    file = write(tmp_path / "log.tfrecord", logged({"x": x}, {"y": x}), logged({"x": x}, {"y": x}, step=4, caller=""))
    signature = Signature(inputs=(spec("x", x),), outputs=(spec("y", x),))
    wanted = ("request/caller", "request/step", "request/time")
    (batch,) = RecordDataset("log", [file], features=wanted).batches(signature, 10)
    assert batch.features["request/caller"].tolist() == ["é".encode()] * 2 + [b""] * 2
    assert batch.features["request/step"].tolist() == [3, 3, 4, 4]
    assert batch.features["request/time"].tolist() == [12_250_000] * 4


@pytest.mark.parametrize("damage", ["filled", "no time", "text", "no tensor", "no record"])
def test_records_that_no_log_holds_are_refused_before_they_fill_the_memory(tmp_path: Path, damage: str) -> None:
    x = np.zeros((1, 2), np.float32)
    signature = Signature(inputs=(spec("x", x),), outputs=(spec("y", x),))
    example = tf.train.Example.FromString(encode_request(logged({"x": x}, {"y": x}))[0])
    known = example.features.feature
    if damage == "filled":
        filling = tf.make_tensor_proto(1.0)
        filling.tensor_shape.CopyFrom(tf.TensorShape([1 << 50]).as_proto())
        known["request/answer/y"].bytes_list.value[0] = filling.SerializeToString()
    elif damage == "no time":
        known["request/time"].Clear()
    elif damage == "text":
        known["request/caller"].bytes_list.value[0] = b"\xff"
    elif damage == "no tensor":
        known["request/answer/y"].bytes_list.value[0] = b"\xff"
    file = tmp_path / "log.tfrecord"
    with tf.io.TFRecordWriter(str(file)) as writer:
        writer.write(b"\xff" if damage == "no record" else example.SerializeToString())
    with pytest.raises(ConfigurationError, match=r"a record of the request log cannot be read \(.+\); give files"):
        list(read_logged([file], signature))


def test_what_is_no_request_log_is_refused_with_a_sentence(tmp_path: Path) -> None:
    x = np.zeros((1, 2), np.float32)
    other = tmp_path / "other.tfrecord"
    with tf.io.TFRecordWriter(str(other)) as writer:
        writer.write(tf.train.Example().SerializeToString())
    signature = Signature(inputs=(spec("x", x),), outputs=(spec("y", x),))
    with pytest.raises(ConfigurationError, match="no logged request"):
        list(read_logged([other], signature))
    file = write(tmp_path / "log.tfrecord", logged({"z": x}, {"y": x}))
    with pytest.raises(ConfigurationError, match=r"has no input 'x'.*it has \['y', 'z'\]"):
        list(read_logged([file], signature))
