"""Compares serialized Keras models by what they compute and how they are scored."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_IGNORED_MODULES = ("keras.initializers", "keras.constraints")
"""Objects of these modules have no effect after a checkpoint is written."""

_IGNORED_ARGUMENTS_OF_COMPILE = ("optimizer", "run_eagerly", "steps_per_execution", "jit_compile", "auto_scale_loss")
_PER_OUTPUT = ("loss", "loss_weights", "metrics", "weighted_metrics")
_SHAPES = ("input_shape", "shapes_dict", "build_input_shape", "batch_shape")
_LAYERS = "keras.layers"
_SHARED = "shared_object_id"
_STATELESS_MODULES = (
    *("builtins", "keras", "keras.activations", "keras.initializers", "keras.regularizers", "keras.constraints"),
    *("keras.losses", "keras.dtype_policies", "keras.quantizers"),
)
_REFERENCE_LENGTH = 3
_INPUT_STEM = "keras_tensor"


def fingerprint(model: Mapping[str, Any], *others: Any) -> str:
    """Return a hash of everything in a serialized model that affects its outputs and its scores, except the weights.

    If two models have equal fingerprints, the weights of one fit the other, in the order of its layers. Names count
    only if callers see them: those that the user gave to inputs and outputs. Ids of shared objects, which Keras takes
    from memory addresses, count only as to which layers are the same object. Batch sizes that a model was built with,
    initializers, seeds and the optimizer do not count.

    Args:
        model: The result of `keras.saving.serialize_keras_object`.
        others: Further JSON values that count.
    """
    return hashlib.sha256(json.dumps([_model(model), *others], sort_keys=True).encode()).hexdigest()


def has_made_up_name(class_name: str, name: str) -> bool:
    """Return whether Keras generated the name of an object of a class, with a per-process counter."""
    return any(re.fullmatch(rf"{re.escape(stem)}(_\d+)?", name) for stem in (_snake_case(class_name), _INPUT_STEM))


def renumbered_metrics(compile_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a compile configuration whose losses and metrics have the names that a new process would generate.

    ``auc_7`` becomes ``auc``, and ``auc_9`` beside it ``auc_1``. A name without a number stays: it is the first of its
    class, or the class's default, which Keras gives to any number of objects.
    """
    numbers: dict[str, set[int]] = {}
    parts = {key: value for key, value in compile_config.items() if key in _PER_OUTPUT}
    for stem, number in _made_up_numbers(parts):
        numbers.setdefault(stem, set()).add(number)
    ranks = {stem: {number: rank for rank, number in enumerate(sorted(found))} for stem, found in numbers.items()}
    return {**compile_config, **{key: _renumbered(value, ranks) for key, value in parts.items()}}


def _made_up_numbers(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the stem and the number of every made-up name; a name without a number has 0."""
    if isinstance(value, list):
        for item in value:
            yield from _made_up_numbers(item)
    elif isinstance(value, dict):
        found = _made_up_number(value)
        if found is not None:
            yield found
        elif "class_name" not in value:
            for item in value.values():
                yield from _made_up_numbers(item)


def _made_up_number(value: Mapping[str, Any]) -> tuple[str, int] | None:
    class_name, config = value.get("class_name"), value.get("config")
    if not (isinstance(class_name, str) and isinstance(config, dict) and isinstance(config.get("name"), str)):
        return None
    stem, name = _snake_case(class_name), config["name"]
    match = re.fullmatch(rf"{re.escape(stem)}(?:_(\d+))?", name)
    return None if match is None else (stem, int(match[1] or 0))


def _renumbered(value: Any, ranks: Mapping[str, Mapping[int, int]]) -> Any:
    if isinstance(value, list):
        return [_renumbered(item, ranks) for item in value]
    if not isinstance(value, dict):
        return value
    found = _made_up_number(value)
    if found is not None:
        stem, number = found
        rank = ranks[stem][number]
        return {**value, "config": {**value["config"], "name": f"{stem}_{rank}" if rank else stem}}
    if "class_name" in value:
        return value
    return {key: _renumbered(item, ranks) for key, item in value.items()}


def _model(model: Mapping[str, Any]) -> Any:
    config = model.get("config")
    names: dict[str, str] = {}
    if isinstance(config, dict) and "layers" in config:
        names = _positions(config["layers"], seen=_interface_names(config))
    compiled = renumbered_metrics(model.get("compile_config") or {})
    rest = {key: value for key, value in model.items() if key not in {"name", "compile_config"}}
    shared = _Sharing([config, {key: compiled.get(key) for key in ("metrics", "weighted_metrics")}])
    return [_object(rest, shared, names=names, is_layer=True), _compile_config(compiled, shared, names)]


def _compile_config(config: Mapping[str, Any], shared: _Sharing, names: Mapping[str, str]) -> Any:
    kept = {key: value for key, value in config.items() if key not in _IGNORED_ARGUMENTS_OF_COMPILE}
    for key in _PER_OUTPUT:
        value = kept.get(key)
        if isinstance(value, dict) and "class_name" not in value:
            kept[key] = {names.get(output, output): item for output, item in value.items()}
    return _value(kept, shared)


def _value(value: Any, shared: _Sharing) -> Any:
    """Return a part of a configuration without irrelevant entries."""
    if isinstance(value, list):
        return [_value(item, shared) for item in value]
    if not isinstance(value, dict):
        return value
    if "class_name" in value and isinstance(value.get("config"), dict):
        return _object(value, shared, names={}, is_layer="trainable" in value["config"])
    return {key: _value(item, shared) for key, item in value.items()}


def _object(value: Mapping[str, Any], shared: _Sharing, *, names: Mapping[str, str], is_layer: bool) -> Any:
    """Return a serialized object without irrelevant entries.

    Args:
        value: The object.
        shared: The objects that occur more than once.
        names: The replacements for the names of its layers; by default their positions.
        is_layer: Whether its name is a layer's.
    """
    if value.get("module") in _IGNORED_MODULES:
        return None
    config = value["config"] if isinstance(value.get("config"), dict) else {}
    has_layers = isinstance(config.get("layers"), list)
    dropped = {_SHARED, "config", "inbound_nodes", *(["name"] if is_layer else [])}
    if ">" in str(value.get("registered_name")):  # more specific than the module that defined it in this process
        dropped.add("module")
    if has_layers:  # their own build configurations are more specific
        dropped.add("build_config")
    found = {key: _shapes(key, _value(item, shared)) for key, item in value.items() if key not in dropped}
    found["same_as"] = shared.number(value)
    if has_layers:
        found["config"] = _config_with_layers(config, shared, names or _positions(config["layers"]))
    else:
        ignored = {"name"} if is_layer else set()
        ignored |= {"seed"} if value.get("module", _LAYERS) == _LAYERS else set()  # legacy files have no module
        items = ((key, item) for key, item in config.items() if key not in ignored)
        found["config"] = {key: _shapes(key, _value(item, shared)) for key, item in items}
    return found


def _config_with_layers(config: Mapping[str, Any], shared: _Sharing, names: Mapping[str, str]) -> Any:
    """Return the configuration of a model that lists its layers, with references to them by position."""
    found = {
        key: _references(_shapes(key, _value(item, shared)), names)
        for key, item in config.items()
        if key not in {"name", "layers"}
    }
    found["layers"] = [
        {
            "name": names.get(_name(layer)),
            "layer": _object(layer, shared, names={}, is_layer=True),
            "inbound_nodes": _references(_value(layer.get("inbound_nodes"), shared), names),
        }
        for layer in config["layers"]
    ]
    return found


def _positions(layers: Any, seen: Collection[str] = ()) -> dict[str, str]:
    """Return replacements for layer names: positions, with the name if callers see it and Keras did not generate it."""
    found = {}
    for index, layer in enumerate(layers):
        name = _name(layer)
        is_told = name in seen and not has_made_up_name(str(layer.get("class_name")), name)
        found[name] = f"#{index} {name}" if is_told else f"#{index}"
    return found


def _interface_names(config: Mapping[str, Any]) -> set[str]:
    """Return the names of a model's input and output layers."""
    if "input_layers" not in config:  # a Sequential model
        return {_name(layer) for layer in (*config["layers"][:1], *config["layers"][-1:])}
    return set(_strings([config["input_layers"], config.get("output_layers")]))


def _name(layer: Mapping[str, Any]) -> str:
    inner = layer.get("config")
    return str(layer.get("name") or (inner.get("name") if isinstance(inner, dict) else None))


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in nested lists, and in the values of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _references(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value with the layer name replaced in every ``[layer, node, tensor, ...]``."""
    if isinstance(value, dict):
        return {key: _references(item, names) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) >= _REFERENCE_LENGTH and isinstance(value[0], str) and value[0] in names:
        return [names[value[0]], *(_references(item, names) for item in value[1:])]
    return [_references(item, names) for item in value]


def _shapes(key: str, value: Any) -> Any:
    """Return shapes without the batch size that the model was built with; other values unchanged."""
    if key == "build_config" and isinstance(value, dict):
        return {inner: _shapes(inner, item) for inner, item in value.items()}
    return _without_batch_size(value) if key in _SHAPES else value


def _without_batch_size(shapes: Any) -> Any:
    if isinstance(shapes, dict):
        return {key: _without_batch_size(item) for key, item in shapes.items()}
    if not isinstance(shapes, list) or not shapes:
        return shapes
    if all(length is None or isinstance(length, int) for length in shapes):
        return [None, *shapes[1:]]
    return [_without_batch_size(item) for item in shapes]


class _Sharing:
    """The serialized layers and metrics that are one object in several places.

    Keras identifies shared objects by memory address, including objects without state, which equal ones can replace.
    """

    def __init__(self, value: Any) -> None:
        times = Counter(_shared_ids(value))
        self._numbers = {identity: number for number, identity in enumerate(times) if times[identity] > 1}

    def number(self, value: Mapping[str, Any]) -> int | None:
        """Return the number of a shared object, or None for any other."""
        return self._numbers.get(value.get(_SHARED)) if _has_state(value) else None


def _shared_ids(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if _SHARED in value and _has_state(value):
            yield value[_SHARED]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _shared_ids(item)


def _has_state(value: Mapping[str, Any]) -> bool:
    """Return whether a serialized object may have variables."""
    return value.get("module") not in _STATELESS_MODULES


def _snake_case(class_name: str) -> str:
    """Return the stem that Keras derives from a class name: ``GRUCell`` gives ``gru_cell``."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", class_name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
