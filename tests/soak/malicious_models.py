"""Malicious checkpoints, written on the spot: what each would do is known, and can be seen.

Each writer gets a folder of its own for the model, and a file that must not appear. A `Harm` says in what the refusal
must be specific. Those of `keras` are a model of one ``Dense`` layer, whose configuration is changed afterwards.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import stat
import struct
import time
import warnings
import zipfile
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from understudy.checkpoints.fs import temporary_folder
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir
from understudy.checkpoints.manifest import Manifest, describe_file, encode_manifest
from understudy.compat import parse_saved_model

Json = dict[str, Any]
Write = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Harm:
    """A malicious checkpoint: how it is stored, what the refusal must say, and what writes it."""

    kind: ModelKind
    refusal: str
    write: Write


HARMS: dict[str, Harm] = {}
"""By what they are."""


def harm(name: str, kind: ModelKind, refusal: str) -> Callable[[Write], Write]:
    """Add what a function writes to `HARMS`."""

    def register(write: Write) -> Write:
        HARMS[name] = Harm(kind, refusal, write)
        return write

    return register


def honest_model() -> Any:
    """Return the model that the malicious checkpoints pretend to hold."""
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, keras.layers.Dense(2, name="y")(inputs), name="honest")
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return model


def publish_malicious(run: RunDir, step: int, malicious: Harm, marker: Path) -> None:
    """Commit a malicious checkpoint to a run folder, with a manifest that describes it correctly."""
    with temporary_folder(run.checkpoint(step)) as folder:
        malicious.write(folder, marker)
        describe(folder, step, malicious.kind)
        folder.rename(run.checkpoint(step))


def describe(folder: Path, step: int, kind: ModelKind) -> None:
    """Write a manifest that describes the files of a folder correctly, as a writer does that is not to be trusted."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    manifest = Manifest(
        step=step,
        epoch=None,
        created_at=time.time(),
        final=False,
        digest=hashlib.sha256(f"{step} {time.time_ns()}".encode()).hexdigest(),
        kind=kind,
        files=tuple(describe_file(folder, name) for name in files),
    )
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(manifest))


# What a .keras file names


def _function(module: str, name: str, **more: Any) -> Json:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name, **more}


def _layer(class_name: str, config: Json, module: str = "keras.layers", **more: Any) -> Json:
    return {
        "module": module,
        "class_name": class_name,
        "config": {"name": "y", **config},
        "registered_name": None,
        **more,
    }


def rewrite_config(file: Path, change: Callable[[Json], None]) -> None:
    """Change the configuration in a ``.keras`` file."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    config = json.loads(members["config.json"])
    change(config)
    members["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _keras(name: str, refusal: str) -> Callable[[Callable[[Json, Path], None]], Callable[[Json, Path], None]]:
    """Register a change of the configuration of an honest model. It gets the whole configuration."""

    def register(change: Callable[[Json, Path], None]) -> Callable[[Json, Path], None]:
        def write(folder: Path, marker: Path) -> None:
            honest_model().save(folder / "model.keras")
            rewrite_config(folder / "model.keras", lambda config: change(config, marker))

        HARMS[name] = Harm(ModelKind.KERAS, refusal, write)
        return change

    return register


def _replace_layer(config: Json, layer: Json, *args: Any, **kwargs: Any) -> None:
    """Put a layer in the place of the Dense one; by default it is called on the input."""
    old = config["config"]["layers"][1]
    nodes = [{"args": list(args), "kwargs": kwargs}] if args or kwargs else old["inbound_nodes"]
    config["config"]["layers"][1] = {**layer, "name": "y", "inbound_nodes": nodes}


def _code(marker: Path) -> str:
    """Return a function that creates a file, as Keras stores a lambda."""
    code = compile(f"lambda x: [open({str(marker)!r}, 'w').close(), x][1]", "<file>", "eval").co_consts[0]
    return b64encode(marshal.dumps(code)).decode()


def _lambda(marker: Path) -> Json:
    return {"class_name": "__lambda__", "config": {"code": _code(marker), "defaults": None, "closure": None}}


@_keras("a Lambda layer", "Lambda")
def _(config: Json, marker: Path) -> None:
    _replace_layer(config, _layer("Lambda", {"function": _lambda(marker), "arguments": {}}))


@_keras("a Lambda layer by its private name", "Lambda")
def _(config: Json, marker: Path) -> None:
    layer = _layer("Lambda", {"function": _lambda(marker), "arguments": {}}, "keras.src.layers.core.lambda_layer")
    _replace_layer(config, layer)


@_keras("a Lambda layer inside of a wrapper", "Lambda")
def _(config: Json, marker: Path) -> None:
    inner = _layer("Lambda", {"function": _lambda(marker), "arguments": {}})
    _replace_layer(config, _layer("TimeDistributed", {"layer": inner}))


@_keras("a Lambda layer in the older format, without a module", "Lambda")
def _(config: Json, marker: Path) -> None:
    layer = _layer("Lambda", {"function": _lambda(marker), "arguments": {}})
    del layer["module"]
    _replace_layer(config, layer)


@_keras("a lambda as an activation", "lambda")
def _(config: Json, marker: Path) -> None:
    config["config"]["layers"][1]["config"]["activation"] = _lambda(marker)


@_keras("a function of any module as a layer (CVE-2025-1550)", "os.system")
def _(config: Json, marker: Path) -> None:
    _replace_layer(config, _function("os", "system"), f"touch {marker}")


@_keras("get_file as a layer (CVE-2025-8747)", "keras.utils.get_file")
def _(config: Json, marker: Path) -> None:
    arguments = {"fname": marker.name, "origin": f"file://{__file__}", "cache_dir": str(marker.parent)}
    _replace_layer(config, _function("keras.utils", "get_file"), **arguments)


@_keras("enable_unsafe_deserialization as a layer (CVE-2025-9906)", "enable_unsafe_deserialization")
def _(config: Json, marker: Path) -> None:
    del marker
    _replace_layer(config, _function("keras.config", "enable_unsafe_deserialization"), x=1)


@_keras("set_epsilon as an activation", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    config["config"]["layers"][1]["config"]["activation"] = _function("keras.config", "set_epsilon")


@_keras("set_epsilon as an initializer", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    config["config"]["layers"][1]["config"]["kernel_initializer"] = _function("keras.config", "set_epsilon")


@_keras("set_epsilon as a metric", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    wrapper = _layer("MeanMetricWrapper", {"fn": _function("keras.config", "set_epsilon")}, "keras.metrics")
    config["compile_config"]["metrics"] = [wrapper]


@_keras("set_epsilon as a loss", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    config["compile_config"]["loss"] = _function("keras.config", "set_epsilon")


@_keras("a function with the name of a class that is registered", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    function = {**_function("keras.config", "set_epsilon"), "registered_name": "tests>Registered"}
    config["config"]["layers"][1]["config"]["activation"] = function


@_keras("an operation that calls a function", "Map")
def _(config: Json, marker: Path) -> None:
    del marker
    tensor = config["config"]["layers"][1]["inbound_nodes"][0]["args"][0]
    _replace_layer(config, _layer("Map", {}, "keras.src.ops.core"), _function("keras.config", "set_epsilon"), tensor)


@_keras("deserialize as an activation", "keras.activations.deserialize")
def _(config: Json, marker: Path) -> None:
    del marker
    config["config"]["layers"][1]["config"]["activation"] = _function("keras.activations", "deserialize")


@_keras("a SavedModel elsewhere (TFSMLayer, CVE-2026-1462)", "TFSMLayer")
def _(config: Json, marker: Path) -> None:
    _replace_layer(config, _layer("TFSMLayer", {"filepath": str(marker.parent), "call_endpoint": "serve"}))


@_keras("a pickled module (TorchModuleWrapper)", "TorchModuleWrapper")
def _(config: Json, marker: Path) -> None:
    del marker
    _replace_layer(
        config, _layer("TorchModuleWrapper", {"module": {"class_name": "__bytes__", "config": {"value": ""}}})
    )


@_keras("a module to import", "keras_hub")
def _(config: Json, marker: Path) -> None:
    del marker
    _replace_layer(config, _layer("Backbone", {}, "keras_hub.models"))


@_keras("a type by its name", "__typespec__")
def _(config: Json, marker: Path) -> None:
    del marker
    spec: Json = {
        "class_name": "__typespec__",
        "spec_name": "x",
        "module": "keras",
        "registered_name": None,
        "config": [],
    }
    config["config"]["layers"][1]["config"]["dtype"] = spec


for _class_name in ("StringLookup", "IntegerLookup", "TextVectorization"):

    @_keras(f"a vocabulary elsewhere ({_class_name})", "vocabulary")
    def _(config: Json, marker: Path, class_name: str = _class_name) -> None:
        del marker
        _replace_layer(config, _layer(class_name, {"vocabulary": "/etc/passwd"}))


# The archive


def _members(folder: Path) -> dict[str, bytes]:
    honest_model().save(folder / "model.keras")
    with zipfile.ZipFile(folder / "model.keras") as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _archive(name: str, refusal: str) -> Callable[[Callable[[zipfile.ZipFile], None]], Any]:
    """Register what is added to the archive of an honest model."""

    def register(add: Callable[[zipfile.ZipFile], None]) -> Any:
        def write(folder: Path, marker: Path) -> None:
            del marker
            members = _members(folder)
            with zipfile.ZipFile(folder / "model.keras", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for member, content in members.items():
                    archive.writestr(member, content)
                add(archive)

        HARMS[name] = Harm(ModelKind.KERAS, refusal, write)
        return add

    return register


@_archive("an archive that expands to 300 MiB", "would expand")
def _(archive: zipfile.ZipFile) -> None:
    with archive.open("assets/zeros", "w") as member:
        for _ in range(300):
            member.write(bytes(2**20))


@_archive("a name that leads out", "leads out")
def _(archive: zipfile.ZipFile) -> None:
    archive.writestr("../outside", "x")


@_archive("an absolute name", "leads out")
def _(archive: zipfile.ZipFile) -> None:
    archive.writestr("/tmp/outside", "x")  # noqa: S108 - never written


@_archive("a symbolic link", "symbolic link")
def _(archive: zipfile.ZipFile) -> None:
    link = zipfile.ZipInfo("assets/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(link, "/etc/passwd")


@_archive("the weights twice", "twice")
def _(archive: zipfile.ZipFile) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it is there already
        archive.writestr("model.weights.h5", "x")


@_archive("20,000 files", "at most 10000")
def _(archive: zipfile.ZipFile) -> None:
    for number in range(20_000):
        archive.writestr(f"assets/{number}", "")


def _keras_of(name: str, refusal: str) -> Callable[[Callable[[dict[str, bytes]], None]], Any]:
    """Register a change of the members of an honest archive."""

    def register(change: Callable[[dict[str, bytes]], None]) -> Any:
        def write(folder: Path, marker: Path) -> None:
            del marker
            members = _members(folder)
            change(members)
            with zipfile.ZipFile(folder / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
                for member, content in members.items():
                    archive.writestr(member, content)

        HARMS[name] = Harm(ModelKind.KERAS, refusal, write)
        return change

    return register


@_keras_of("a config.json of 64 MiB", "config.json has")
def _(members: dict[str, bytes]) -> None:
    members["config.json"] = b"[" + b" " * 2**26 + b"]"


@_keras_of("a config.json of millions of lists", "values")
def _(members: dict[str, bytes]) -> None:
    members["config.json"] = b"[" + b"[]," * 2_500_000 + b"[]]"


@_keras_of("a config.json nested without end", "maximum recursion|nested")
def _(members: dict[str, bytes]) -> None:
    members["config.json"] = b"[" * 100_000 + b"]" * 100_000


@harm("files that overlap in the archive", ModelKind.KERAS, "overlap")
def _(folder: Path, marker: Path) -> None:
    del marker
    honest_model().save(folder / "model.keras")
    content = bytearray((folder / "model.keras").read_bytes())
    with zipfile.ZipFile(folder / "model.keras") as archive:
        weights = archive.getinfo("model.weights.h5")
        directory = archive.start_dir
    entry = content.index(b"config.json", directory) - 46
    struct.pack_into("<L", content, entry + 42, weights.header_offset + 40)
    (folder / "model.keras").write_bytes(content)


@harm("an encrypted file in the archive", ModelKind.KERAS, "encrypted")
def _(folder: Path, marker: Path) -> None:
    del marker
    honest_model().save(folder / "model.keras")
    content = bytearray((folder / "model.keras").read_bytes())
    with zipfile.ZipFile(folder / "model.keras") as archive:
        directory = archive.start_dir
    content[content.index(b"config.json", directory) - 46 + 8] |= 1
    (folder / "model.keras").write_bytes(content)


@harm("a size that is not the real one", ModelKind.KERAS, "CRC|bytes, its directory|Error")
def _(folder: Path, marker: Path) -> None:
    del marker
    members = {**_members(folder), "config.json": b" " * 2**22 + b"{}"}
    with zipfile.ZipFile(folder / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    content = bytearray((folder / "model.keras").read_bytes())
    with zipfile.ZipFile(folder / "model.keras") as archive:
        directory = archive.start_dir
    struct.pack_into("<L", content, content.index(b"config.json", directory) - 46 + 24, 100)
    (folder / "model.keras").write_bytes(content)


# HDF5

Spoil = Callable[[h5py.File, Path], None]


def _external_link(file: h5py.File, marker: Path) -> None:
    other = marker.with_suffix(".h5")
    with h5py.File(other, "w") as target:
        target["secret"] = np.ones(3)
    file["elsewhere"] = h5py.ExternalLink(str(other), "secret")


def _soft_link(file: h5py.File, marker: Path) -> None:
    del marker
    file["elsewhere"] = h5py.SoftLink("/missing")


def _external_storage(file: h5py.File, marker: Path) -> None:
    del marker
    file.create_dataset("elsewhere", (16,), "u1", external=[("/etc/passwd", 0, 16)])


def _virtual(file: h5py.File, marker: Path) -> None:
    other = marker.with_suffix(".h5")
    with h5py.File(other, "w") as target:
        target["secret"] = np.ones(3)
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(other), "secret", (3,))
    file.create_virtual_dataset("elsewhere", layout)


def _shape_bomb(file: h5py.File, marker: Path) -> None:
    del marker
    file.create_dataset("large", (2**40,), "f4", chunks=(2**10,), fillvalue=0)


def _contiguous_bomb(file: h5py.File, marker: Path) -> None:
    del marker
    space = h5py.h5s.create_simple((2**36,))
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    h5py.h5d.create(file.id, b"large", h5py.h5t.IEEE_F32LE, space, creation)


def _deflate_bomb(file: h5py.File, marker: Path) -> None:
    del marker
    file.create_dataset("large", (300, 2**20), "u1", chunks=(1, 2**20), compression="gzip", compression_opts=1)[:] = 0


def _large_attribute(file: h5py.File, marker: Path) -> None:
    """Texts that share what is stored: each of them is the same megabyte."""
    del marker
    texts = file.create_dataset("texts", (400,), h5py.string_dtype())
    texts[0] = "x" * 2**20
    name = file.filename
    offset = texts.id.get_offset()
    file.flush()
    file.close()
    with Path(name).open("r+b") as raw:
        raw.seek(offset)
        reference = raw.read(16)
        raw.seek(offset)
        raw.write(reference * 400)


_SPOILS: Mapping[str, tuple[str, Spoil]] = {
    "a link to another file": ("link to another file", _external_link),
    "a soft link": ("link that Keras never writes", _soft_link),
    "a dataset stored in another file": ("stored in other files", _external_storage),
    "a dataset put together from others": ("stored in other files", _virtual),
    "a shape of 4 TiB": ("would take it to", _shape_bomb),
    "a shape of 256 GiB without chunks": ("would take it to", _contiguous_bomb),
    "300 MiB of compressed zeros": ("would take it to", _deflate_bomb),
    "texts that share a megabyte": ("would take it to", _large_attribute),
}


def _spoil_file(spoil: Spoil, path: Path, marker: Path) -> None:
    file = h5py.File(path, "r+")
    try:
        spoil(file, marker)
    finally:
        file.close()


def _register_spoil(name: str, refusal: str, spoil: Spoil) -> None:
    @harm(f"{name}, in .weights.h5", ModelKind.WEIGHTS, refusal)
    def _(folder: Path, marker: Path) -> None:
        honest_model().save_weights(folder / "model.weights.h5")
        _spoil_file(spoil, folder / "model.weights.h5", marker)

    @harm(f"{name}, in .h5", ModelKind.HDF5, refusal)
    def _(folder: Path, marker: Path) -> None:
        honest_model().save(folder / "model.h5")
        _spoil_file(spoil, folder / "model.h5", marker)

    @harm(f"{name}, in .keras", ModelKind.KERAS, refusal)
    def _(folder: Path, marker: Path) -> None:
        members = _members(folder)
        weights = folder / "spoilt.h5"
        weights.write_bytes(members["model.weights.h5"])
        _spoil_file(spoil, weights, marker)
        with zipfile.ZipFile(folder / "model.keras", "w") as archive:
            for member, content in {**members, "model.weights.h5": weights.read_bytes()}.items():
                archive.writestr(member, content)
        weights.unlink()


for _name, (_refusal, _spoil) in _SPOILS.items():
    _register_spoil(_name, _refusal, _spoil)


def _rewrite_model_config(path: Path, change: Callable[[Json], None]) -> None:
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        change(config)
        file.attrs["model_config"] = json.dumps(config)


@harm("a Lambda layer in .h5 (CVE-2025-9905)", ModelKind.HDF5, "Lambda|lambda")
def _(folder: Path, marker: Path) -> None:
    def change(config: Json) -> None:
        layer = config["config"]["layers"][1]
        function = [_code(marker), None, None]
        layer.update({"class_name": "Lambda", "config": {"name": "y", "function": function, "function_type": "lambda"}})
        layer.pop("module", None)

    honest_model().save(folder / "model.h5")
    _rewrite_model_config(folder / "model.h5", change)


@harm("a function as a layer in .h5", ModelKind.HDF5, "deserialize")
def _(folder: Path, marker: Path) -> None:
    del marker

    def change(config: Json) -> None:
        layer = config["config"]["layers"][1]
        layer.update({"class_name": "deserialize", "config": {"config": _function("keras.config", "set_epsilon")}})
        layer.pop("module", None)

    honest_model().save(folder / "model.h5")
    _rewrite_model_config(folder / "model.h5", change)


@harm("set_epsilon as a loss in .h5", ModelKind.HDF5, "set_epsilon")
def _(folder: Path, marker: Path) -> None:
    del marker
    honest_model().save(folder / "model.h5")
    with h5py.File(folder / "model.h5", "r+") as file:
        training = json.loads(file.attrs["training_config"])
        training["loss"] = _function("keras.config", "set_epsilon")
        file.attrs["training_config"] = json.dumps(training)


@_keras("variables of 4 TiB in a file of some kilobytes", "variables of")
def _(config: Json, marker: Path) -> None:
    del marker
    layer = config["config"]["layers"][1]
    layer["config"]["units"] = 2**38
    layer.pop("build_config", None)


# SavedModels


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
