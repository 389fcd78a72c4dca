"""Files of examples that claim more than they hold end with a sentence, before anything is allocated for the claim."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset_files import open_dataset, open_files
from understudy.evaluator.datasets.request_records import read_logged
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.experiments import file_sizes

MIB = 1024 * 1024
BOUND_BYTES = 32 * MIB
"""The most memory that refusing a file may take."""

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 2)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, 2)),),
)
CASTAGNOLI = 0x82F63B78


def header_of(length: int) -> bytes:
    """Return a record's length with its right checksum, as TensorFlow writes them."""
    content = struct.pack("<Q", length)
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (CASTAGNOLI if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return content + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def long_record(folder: Path) -> Path:
    file = folder / "long.tfrecord"
    file.write_bytes(header_of(2**40) + b"x" * 100)
    return file


def longer_than_the_file(folder: Path) -> Path:
    file = folder / "longer.tfrecord"
    file.write_bytes(header_of(200 * MIB) + b"x" * 100)
    return file


def bomb_of_records(folder: Path) -> Path:
    file = folder / "bomb.tfrecord.gz"
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    zeros = (packer.compress(bytes(MIB)) for _ in range(300))
    file.write_bytes(packer.compress(header_of(300 * MIB)) + b"".join(zeros) + packer.flush())
    return file


def cut_compressed_records(folder: Path) -> Path:
    file = folder / "cut.tfrecord.gz"
    file.write_bytes(gzip.compress(header_of(10 * MIB) + np.random.default_rng(0).bytes(MIB))[: MIB // 2])
    return file


def records_of_holes(folder: Path) -> Path:
    file = folder / "holes.tfrecord"
    with file.open("wb") as sparse:
        sparse.truncate(2**41)
    return file


def pipe_of_records(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.tfrecord")
    return folder / "pipe.tfrecord"


def pipe_of_arrays(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.npz")
    return folder / "pipe.npz"


def claimed(shape: tuple[int, ...]) -> bytes:
    """Return the header of an array, without the array."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue()


def zipped(file: Path, *pieces: bytes) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("x.npy", "y.npy"):
            with archive.open(name, "w") as member:
                for piece in pieces:
                    member.write(piece)
    return file


def claimed_array(folder: Path) -> Path:
    return zipped(folder / "claimed.npz", claimed((2**40,)))


def empty_examples(folder: Path) -> Path:
    return zipped(folder / "empty.npz", claimed((2**40, 0)))


def bomb_of_arrays(folder: Path) -> Path:
    return zipped(folder / "bomb.npz", claimed((64 * MIB // 4,)), *[bytes(MIB)] * 64)


def pickled(folder: Path) -> Path:
    file = folder / "pickled.npz"
    np.savez(file, allow_pickle=True, x=np.array([{}], object), y=np.zeros(1))
    return file


def cut_arrays(folder: Path) -> Path:
    file = folder / "cut.npz"
    np.savez(file, allow_pickle=False, x=np.zeros((100, 2)), y=np.zeros((100, 2)))
    file.write_bytes(file.read_bytes()[:-200])
    return file


def no_array(folder: Path) -> Path:
    return zipped(folder / "text.npz", b"text")


RECORDS: dict[Callable[[Path], Path], str] = {
    long_record: "record 0 has 1099511627776 bytes; the limit is 268435456",
    longer_than_the_file: "it ends within record 0, which has 209715200 bytes",
    bomb_of_records: "record 0 has 314572800 bytes; the limit is 268435456",
    cut_compressed_records: "it is damaged after record 0",
    records_of_holes: "record 0 is nothing but zeros",
    pipe_of_records: "it is no regular file",
}
ARRAYS: dict[Callable[[Path], Path], str] = {
    claimed_array: "x.npy claims an array of 4398046511104 bytes, and holds 128",
    empty_examples: r"x.npy has the shape \(1099511627776, 0\)",
    bomb_of_arrays: "its arrays take 134217984 bytes of memory, and 1048576 are available",
    pickled: "Object arrays cannot be loaded",
    cut_arrays: "is not a readable .npy or .npz file",
    no_array: "is not a readable .npy or .npz file",
    pipe_of_arrays: "it is no regular file",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [*RECORDS, *ARRAYS], ids=lambda make: make.__name__)
def test_a_hostile_dataset_is_refused_by_name_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr(file_sizes, "MAX_ARRAY_BYTES", MIB)
    monkeypatch.setattr(file_sizes, "available_memory_bytes", lambda: MIB)
    file = make(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigurationError, match={**RECORDS, **ARRAYS}[make]) as refused:
            open_dataset("test", file)
        with pytest.raises(ConfigurationError, match={**RECORDS, **ARRAYS}[make]):
            open_files("test", [file], inputs_only=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(file) in str(refused.value)
    assert peak < BOUND_BYTES


@pytest.mark.parametrize("make", RECORDS, ids=lambda make: make.__name__)
def test_a_hostile_request_log_is_refused_by_name(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(ConfigurationError, match=rf"request log: .* is not a whole TFRecord file \({RECORDS[make]}"):
        list(read_logged([make(tmp_path)], SIGNATURE))


def an_example(**more: tf.train.Feature) -> bytes:
    values = tf.train.Feature(float_list=tf.train.FloatList(value=[1, 2]))
    content: bytes = tf.train.Example(
        features=tf.train.Features(feature={"x": values, "y": values, **more})
    ).SerializeToString()
    return content


def test_one_value_does_not_stand_for_any_number_of_elements(tmp_path: Path) -> None:
    filled = tf.make_tensor_proto(1.0)
    filled.tensor_shape.CopyFrom(tf.TensorShape([1 << 40]).as_proto())
    file = tmp_path / "filled.tfrecord"
    with tf.io.TFRecordWriter(str(file)) as writer:
        writer.write(an_example(y=tf.train.Feature(bytes_list=tf.train.BytesList(value=[filled.SerializeToString()]))))
    with pytest.raises(InvalidInputError, match=r"feature 'y' has 1099511627776 elements in [0-9]+ bytes"):
        list(open_dataset("test", file).batches(SIGNATURE, 10))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_grows_after_it_was_opened_is_refused_and_one_that_grows_while_it_is_read_ends(
    tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"growing.tfrecord{suffix}"

    def append(count: int) -> None:
        whole = tmp_path / "whole.tfrecord"
        with tf.io.TFRecordWriter(str(whole)) as writer:
            for _ in range(count):
                writer.write(an_example())
        content = whole.read_bytes()
        with file.open("ab") as growing:
            growing.write(gzip.compress(content) if suffix else content)

    append(3)
    dataset = open_dataset("test", file)
    batches = dataset.batches(SIGNATURE, 1)
    next(batches)
    append(1000)
    assert sum(1 for _ in batches) == 2
    with pytest.raises(ConfigurationError, match=r"has 1003 records, and had 3 when it was opened; start again"):
        next(dataset.batches(SIGNATURE, 1))
    with file.open("ab") as growing:
        growing.write(b"\1" * 5)
    with pytest.raises(ConfigurationError, match="not a whole TFRecord file"):
        open_dataset("test", file)
