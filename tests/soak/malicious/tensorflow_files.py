"""Malicious SavedModels and checkpoints of `tf.train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from soak.malicious.harms import HARMS, Harm, harm
from understudy.checkpoints.kinds import ModelKind
from understudy.compat import parse_saved_model

FEATURES = tf.TensorSpec((None, 3), tf.float32, name="x")
WORDS = tf.TensorSpec((None,), tf.string, name="x")


class _Serving(tf.Module):  # type: ignore[misc]
    """A module whose signature computes something, with a side effect."""

    def __init__(self, effect: Callable[[Any], Any]) -> None:
        self.scale = tf.Variable(2.0)
        self.effect = effect

        def serve(x: Any) -> dict[str, Any]:
            with tf.control_dependencies([self.effect(x)]):
                return {"y": x * self.scale}

        self.serve = tf.function(serve, input_signature=[FEATURES], autograph=False)


def _saved_model(name: str, refusal: str) -> Callable[[Callable[[Any, Path], Any]], Any]:
    def register(effect: Callable[[Any, Path], Any]) -> Any:
        def write(folder: Path, marker: Path) -> None:
            module = _Serving(lambda x: effect(x, marker))
            tf.saved_model.save(module, str(folder / "saved_model"), signatures={"serving_default": module.serve})

        HARMS[name] = Harm(ModelKind.SAVED_MODEL, refusal, write)
        return effect

    return register


@_saved_model("a SavedModel that reads a file", "ReadFile")
def _(x: Any, marker: Path) -> Any:
    del x, marker
    return tf.io.read_file("/etc/passwd")


@_saved_model("a SavedModel that writes a file", "WriteFile")
def _(x: Any, marker: Path) -> Any:
    del x
    return tf.io.write_file(str(marker), "written")


@_saved_model("a SavedModel that writes a file if the sum is positive", "WriteFile")
def _(x: Any, marker: Path) -> Any:
    def write() -> Any:
        with tf.control_dependencies([tf.io.write_file(str(marker), "written")]):
            return tf.constant(1)

    return tf.cond(tf.reduce_sum(x) > 0, write, lambda: tf.constant(0))


@_saved_model("a SavedModel that saves a checkpoint", "SaveV2")
def _(x: Any, marker: Path) -> Any:
    return tf.raw_ops.SaveV2(prefix=str(marker), tensor_names=["x"], shape_and_slices=[""], tensors=[x])


@_saved_model("a SavedModel that restores a checkpoint", "RestoreV2")
def _(x: Any, marker: Path) -> Any:
    del x
    return tf.raw_ops.RestoreV2(prefix=str(marker), tensor_names=["x"], shape_and_slices=[""], dtypes=[tf.float32])[0]


@_saved_model("a SavedModel that calls Python", "EagerPyFunc|PyFunc")
def _(x: Any, marker: Path) -> Any:
    return tf.py_function(lambda _: marker.touch(), [x], [])


@_saved_model("a SavedModel that calls Python by number", "PyFuncStateless|PyFunc")
def _(x: Any, marker: Path) -> Any:
    return tf.numpy_function(lambda _: np.float32(marker.write_text("called")), [x], tf.float32, stateful=False)


@_saved_model("a SavedModel that prints to a file", "prints to a file")
def _(x: Any, marker: Path) -> Any:
    return tf.print(x, output_stream=f"file://{marker}")


@_saved_model("a SavedModel that lists files", "MatchingFiles")
def _(x: Any, marker: Path) -> Any:
    del x, marker
    return tf.io.matching_files("/etc/*")


@_saved_model("a SavedModel that reads records", "Dataset")
def _(x: Any, marker: Path) -> Any:
    del x
    dataset = tf.data.TFRecordDataset([str(marker)])
    return dataset.reduce(tf.constant(0), lambda count, _: count + 1)


class _TableFromFile(tf.Module):  # type: ignore[misc]
    """Reads a file of the machine into a table that is not an asset of the model."""

    def __init__(self) -> None:
        def serve(x: Any) -> dict[str, Any]:
            table = tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.string, shared_name="stolen")
            filled = tf.raw_ops.InitializeTableFromTextFileV2(
                table_handle=table,
                filename=tf.identity(tf.constant("/etc/passwd")),
                key_index=-1,
                value_index=-2,
            )
            with tf.control_dependencies([filled]):
                line = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=tf.cast(x, tf.int64), default_value="")
            return {"y": line}

        self.serve = tf.function(serve, input_signature=[FEATURES], autograph=False)


@harm("a SavedModel that reads a file into a table", ModelKind.SAVED_MODEL, "not an asset")
def _(folder: Path, marker: Path) -> None:
    del marker
    module = _TableFromFile()
    tf.saved_model.save(module, str(folder / "saved_model"), signatures={"serving_default": module.serve})


def model_with_asset(vocabulary: Path) -> Any:
    """Return a module with a table from a file, which becomes an asset."""

    class Table(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            source = tf.lookup.TextFileInitializer(str(vocabulary), tf.string, -2, tf.int64, -1)
            self.table = tf.lookup.StaticHashTable(source, -1)

            def serve(x: Any) -> dict[str, Any]:
                return {"y": self.table.lookup(x)}

            self.serve = tf.function(serve, input_signature=[WORDS], autograph=False)

    return Table()


@harm("a SavedModel whose asset is elsewhere", ModelKind.SAVED_MODEL, "leads out")
def _(folder: Path, marker: Path) -> None:
    vocabulary = marker.with_suffix(".txt")
    vocabulary.write_text("a\nb\n")
    module = model_with_asset(vocabulary)
    tf.saved_model.save(module, str(folder / "saved_model"), signatures={"serving_default": module.serve})
    graph = folder / "saved_model" / "saved_model.pb"
    message = parse_saved_model(graph.read_bytes())
    message.meta_graphs[0].asset_file_def[0].filename = "../../../../../../etc/passwd"
    graph.write_bytes(message.SerializeToString())


# tf.train


@harm("a checkpoint of tf.train whose tensor declares more than is stored", ModelKind.TF_CHECKPOINT, "declares")
def _(folder: Path, marker: Path) -> None:
    del marker
    tf.train.Checkpoint(value=tf.Variable(tf.zeros((3, 5)))).write(str(folder / "model.ckpt"))
    _enlarge(folder / "model.ckpt.index", dimension=5)


def _enlarge(index: Path, dimension: int) -> None:
    """Make the size of one dimension in an index of variables larger."""
    content = index.read_bytes()
    old, new = bytes([0x12, 2, 0x08, dimension]), bytes([0x12, 2, 0x08, 0x7F])
    position = content.index(old)
    index.write_bytes(content[:position] + new + content[position + 4 :])
