"""Experiments that train from files. An environment variable names the folder, for subprocesses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from testkit.training_harness import Dense, Noisy
from understudy.experiments.arrays import IndexedExamples, array_examples, open_array
from understudy.experiments.records import RecordExamples, record_examples

FOLDER = "UNDERSTUDY_TEST_DATA"
"""The environment variable that names the folder of the files."""

_FEATURES = {"x": tf.io.FixedLenFeature((8,), tf.float32), "y": tf.io.FixedLenFeature((), tf.int64)}


def write_files(folder: Path) -> None:
    """Write the training data of `Noisy` as arrays and as TFRecord files, each split into parts of unequal sizes."""
    examples = list(Noisy().training_data().as_numpy_iterator())
    x, y = (np.stack(column) for column in zip(*examples, strict=True))
    for index, rows in enumerate((slice(0, 37), slice(37, 60), slice(60, None))):
        np.save(folder / f"x-{index}.npy", x[rows])
        with tf.io.TFRecordWriter(str(folder / f"{index}.tfrecord")) as writer:
            for features, label in zip(x[rows], y[rows], strict=True):
                writer.write(_serialize(features, label))
    np.savez(folder / "labels.npz", allow_pickle=False, y=y)


def _serialize(features: Any, label: Any) -> bytes:
    example = tf.train.Example()
    example.features.feature["x"].float_list.value.extend(features)
    example.features.feature["y"].int64_list.value.append(label)
    return bytes(example.SerializeToString())


def from_arrays() -> IndexedExamples:
    folder = Path(os.environ[FOLDER])
    return array_examples(
        (open_array(*sorted(folder.glob("x-*.npy"))), open_array(folder / "labels.npz", member="y")),
    )


def from_records() -> RecordExamples:
    return record_examples(sorted(Path(os.environ[FOLDER]).glob("*.tfrecord")), _parse)


def _parse(record: tf.Tensor) -> Any:
    example = tf.io.parse_single_example(record, _FEATURES)
    return example["x"], example["y"]


class NoisyArrays(Noisy):
    def training_data(self) -> Any:
        return from_arrays()


class NoisyRecords(Noisy):
    def training_data(self) -> Any:
        return from_records()


class PlainArrays(Dense):
    """The same, for a model that several replicas train to the weights of one device."""

    def build_model(self) -> Any:
        return one_output(super().build_model())

    def training_data(self) -> Any:
        return from_arrays()


class PlainRecords(PlainArrays):
    def training_data(self) -> Any:
        return from_records()


def one_output(model: Any) -> Any:
    import keras

    classifier = keras.Model(model.inputs, model.outputs[0])
    classifier.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return classifier
