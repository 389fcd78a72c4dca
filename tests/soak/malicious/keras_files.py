"""Malicious configurations in ``.keras`` files: a model of one ``Dense`` layer, changed afterwards."""

from __future__ import annotations

import json
import marshal
import zipfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak.malicious.harms import HARMS, Harm, Json, write_honest
from understudy.checkpoints.kinds import ModelKind


def function_config(module: str, name: str, **more: Any) -> Json:
    """Return how Keras writes a function."""
    return {"module": module, "class_name": "function", "config": name, "registered_name": name, **more}


def layer_config(class_name: str, config: Json, module: str = "keras.layers", **more: Any) -> Json:
    """Return how Keras writes a layer."""
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
            write_honest(folder / "model.keras")
            rewrite_config(folder / "model.keras", lambda config: change(config, marker))

        HARMS[name] = Harm(ModelKind.KERAS, refusal, write)
        return change

    return register


def _replace_layer(config: Json, layer: Json, *args: Any, **kwargs: Any) -> None:
    """Put a layer in the place of the Dense one; by default it is called on the input."""
    old = config["config"]["layers"][1]
    nodes = [{"args": list(args), "kwargs": kwargs}] if args or kwargs else old["inbound_nodes"]
    config["config"]["layers"][1] = {**layer, "name": "y", "inbound_nodes": nodes}


def lambda_code(marker: Path) -> str:
    """Return a function that creates a file, as Keras stores a lambda."""
    code = compile(f"lambda x: [open({str(marker)!r}, 'w').close(), x][1]", "<file>", "eval").co_consts[0]
    return b64encode(marshal.dumps(code)).decode()


def _lambda(marker: Path) -> Json:
    return {"class_name": "__lambda__", "config": {"code": lambda_code(marker), "defaults": None, "closure": None}}


@_keras("a Lambda layer", "Lambda")
def _(config: Json, marker: Path) -> None:
    _replace_layer(config, layer_config("Lambda", {"function": _lambda(marker), "arguments": {}}))


@_keras("a Lambda layer by its private name", "Lambda")
def _(config: Json, marker: Path) -> None:
    layer = layer_config("Lambda", {"function": _lambda(marker), "arguments": {}}, "keras.src.layers.core.lambda_layer")
    _replace_layer(config, layer)


@_keras("a Lambda layer inside of a wrapper", "Lambda")
def _(config: Json, marker: Path) -> None:
    inner = layer_config("Lambda", {"function": _lambda(marker), "arguments": {}})
    _replace_layer(config, layer_config("TimeDistributed", {"layer": inner}))


@_keras("a Lambda layer in the older format, without a module", "Lambda")
def _(config: Json, marker: Path) -> None:
    layer = layer_config("Lambda", {"function": _lambda(marker), "arguments": {}})
    del layer["module"]
    _replace_layer(config, layer)


@_keras("a lambda as an activation", "lambda")
def _(config: Json, marker: Path) -> None:
    config["config"]["layers"][1]["config"]["activation"] = _lambda(marker)


@_keras("a function of any module as a layer (CVE-2025-1550)", "os.system")
def _(config: Json, marker: Path) -> None:
    _replace_layer(config, function_config("os", "system"), f"touch {marker}")


@_keras("get_file as a layer (CVE-2025-8747)", "keras.utils.get_file")
def _(config: Json, marker: Path) -> None:
    arguments = {"fname": marker.name, "origin": f"file://{__file__}", "cache_dir": str(marker.parent)}
    _replace_layer(config, function_config("keras.utils", "get_file"), **arguments)


@_keras("enable_unsafe_deserialization as a layer (CVE-2025-9906)", "enable_unsafe_deserialization")
def _(config: Json, marker: Path) -> None:
    del marker
    _replace_layer(config, function_config("keras.config", "enable_unsafe_deserialization"), x=1)


@_keras("set_epsilon as an activation", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    config["config"]["layers"][1]["config"]["activation"] = function_config("keras.config", "set_epsilon")


@_keras("set_epsilon as an initializer", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    config["config"]["layers"][1]["config"]["kernel_initializer"] = function_config("keras.config", "set_epsilon")


@_keras("set_epsilon as a metric", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    wrapper = layer_config("MeanMetricWrapper", {"fn": function_config("keras.config", "set_epsilon")}, "keras.metrics")
    config["compile_config"]["metrics"] = [wrapper]


@_keras("set_epsilon as a loss", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    config["compile_config"]["loss"] = function_config("keras.config", "set_epsilon")


@_keras("a function with the name of a class that is registered", "keras.config.set_epsilon")
def _(config: Json, marker: Path) -> None:
    del marker
    function = {**function_config("keras.config", "set_epsilon"), "registered_name": "tests>Registered"}
    config["config"]["layers"][1]["config"]["activation"] = function


@_keras("an operation that calls a function", "Map")
def _(config: Json, marker: Path) -> None:
    del marker
    tensor = config["config"]["layers"][1]["inbound_nodes"][0]["args"][0]
    _replace_layer(
        config, layer_config("Map", {}, "keras.src.ops.core"), function_config("keras.config", "set_epsilon"), tensor
    )


@_keras("deserialize as an activation", "keras.activations.deserialize")
def _(config: Json, marker: Path) -> None:
    del marker
    config["config"]["layers"][1]["config"]["activation"] = function_config("keras.activations", "deserialize")


@_keras("a SavedModel elsewhere (TFSMLayer, CVE-2026-1462)", "TFSMLayer")
def _(config: Json, marker: Path) -> None:
    _replace_layer(config, layer_config("TFSMLayer", {"filepath": str(marker.parent), "call_endpoint": "serve"}))


@_keras("a pickled module (TorchModuleWrapper)", "TorchModuleWrapper")
def _(config: Json, marker: Path) -> None:
    del marker
    _replace_layer(
        config, layer_config("TorchModuleWrapper", {"module": {"class_name": "__bytes__", "config": {"value": ""}}})
    )


@_keras("a module to import", "keras_hub")
def _(config: Json, marker: Path) -> None:
    del marker
    _replace_layer(config, layer_config("Backbone", {}, "keras_hub.models"))


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
        _replace_layer(config, layer_config(class_name, {"vocabulary": "/etc/passwd"}))


@_keras("variables of 4 TiB in a file of some kilobytes", "variables of")
def _(config: Json, marker: Path) -> None:
    del marker
    layer = config["config"]["layers"][1]
    layer["config"]["units"] = 2**38
    layer.pop("build_config", None)
