"""Configurations that Keras 2 wrote (TensorFlow up to 2.15, and tf_keras), in the words of Keras 3.

Keras 3 builds the same layers with the same weights, but does not read what Keras 2 says of them: modules that are
gone, arguments that have other names or none, layers without a module. docs/decisions/keras-2.md has the differences.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import keras

_SCORING: Final = ("loss", "loss_weights", "metrics", "weighted_metrics")
"""The arguments of ``compile`` that scoring needs."""

_FUNCTIONAL: Final = {"module": "keras.src.models.functional", "registered_name": "Functional"}
_MODELS: Final = ("Model", "Functional")
"""The names of a functional model; before TensorFlow 2.2 it was the first."""

_MODULES: Final = {
    "loss": "keras.losses",
    "metrics": "keras.metrics",
    "weighted_metrics": "keras.metrics",
    "initializer": "keras.initializers",
    "regularizer": "keras.regularizers",
    "constraint": "keras.constraints",
}
"""The module of a class by how the name of the argument ends; all others are layers."""

_GONE: Final = frozenset(
    {"input_length", "kernel_initializer", "key_shape", "query_shape", "rng_type", "trainable", "value_shape"}
)
"""Arguments that some classes have no more, and that change nothing in a model that is built and is not trained."""

_RECURRENT: Final = ("Bidirectional", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "GRU", "LSTM", "RNN", "SimpleRNN")

_ALONE: Final = 3
"""The length of a reference to the result of a call, without the other arguments of the call that takes it."""

_CHANGED: Final = "hard_sigmoid"
"""The function of Keras 3 is clip(x / 6 + 0.5, 0, 1); that of Keras 2 was clip(x / 5 + 0.5, 0, 1)."""


class UntranslatableError(Exception):
    """Keras 3 cannot build a model of Keras 2 that computes the same. The text says what is in the way."""


def translated(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a serialized model for Keras 3.

    Raises:
        UntranslatableError: Keras 3 would compute something else, or it is no serialized model.
    """
    with _reading():
        return dict(_translated(model, ""))


def translated_compilation(config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of serialized arguments of ``compile`` for Keras 3, without the optimizer.

    Args:
        config: The arguments.
        model: The serialized model.

    Raises:
        UntranslatableError: They are none.
    """
    with _reading():
        found = {name: _translated(config.get(name), name) for name in _SCORING}
        for name in ("metrics", "weighted_metrics"):
            _remove_outputs(found[name], output_names(model))
        return found


def output_names(model: Mapping[str, Any]) -> list[str]:
    """Return the names of the outputs of a serialized functional model of Keras 2 that returns a list."""
    references = (model.get("config") or {}).get("output_layers") or ()
    return [reference[0] for reference in references if _is_reference(reference)]


def _remove_outputs(metrics: Any, outputs: Sequence[str]) -> None:
    """Remove the output from the names of its metrics: Keras 2 saves it with them, and Keras 3 adds it again."""
    if isinstance(metrics, dict):
        of_outputs = list(metrics.items())
    else:
        of_outputs = list(zip(outputs, metrics or (), strict=False)) if len(outputs) > 1 else []
    for output, own in of_outputs:
        for metric in own if isinstance(own, list) else [own]:
            if isinstance(metric, dict) and isinstance(metric["config"].get("name"), str):
                metric["config"]["name"] = metric["config"]["name"].removeprefix(f"{output}_")


@contextmanager
def _reading() -> Iterator[None]:
    """Report what is not as Keras writes it. The file may be anybody's."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UntranslatableError("its configuration is not as Keras 2 writes it") from error


def _translated(config: Any, argument: str) -> Any:
    """Return a copy of a serialized object, or of any JSON value, which is the value of an argument."""
    if _CHANGED in (config, isinstance(config, dict) and config.get("config")) and argument.endswith("activation"):
        raise UntranslatableError(f"it uses the activation {_CHANGED}, which Keras 3 computes in another way")
    if isinstance(config, list):
        return [_translated(item, argument) for item in config]
    if not isinstance(config, dict):
        return config
    kind, own = config.get("class_name"), config.get("config")
    if not isinstance(kind, str):
        return {name: _translated(value, argument if argument in _MODULES else name) for name, value in config.items()}
    if kind == "Policy" and isinstance(own, dict):
        return own.get("name")
    found = {**config, **_location(kind, config, argument)}
    found.pop("compile_config", None)  # of a model within the model
    if _public_class(found) is not None:
        found.pop("build_config", None)  # in a model, the call of a layer builds it
    if isinstance(own, dict):
        found["config"] = _arguments(found, {name: _translated(value, name) for name, value in own.items()})
        if kind == "MeanMetricWrapper":
            return _wrapped_metric(found)
    return found


def _location(kind: str, config: Mapping[str, Any], argument: str) -> Mapping[str, Any]:
    """Return the module and the registered name under which Keras 3 knows a class."""
    module, registered = config.get("module"), config.get("registered_name")
    is_public = isinstance(module, str) and module.startswith("keras.") and module.count(".") == 1
    if is_public or (isinstance(registered, str) and ">" in registered):
        return {}
    if kind in _MODELS and "layers" in (config.get("config") or ()):
        return {**_FUNCTIONAL, "class_name": "Functional"}
    if kind == "Sequential":
        return {"module": "keras", "registered_name": None}
    if ">" in kind:  # an HDF5 file has the name under which it is registered in place of the class
        return {"module": None, "class_name": kind.rpartition(">")[2], "registered_name": kind}
    place = next((module for end, module in _MODULES.items() if argument.endswith(end)), "keras.layers")
    if module is None or hasattr(_module(place), kind):
        return {"module": place, "registered_name": registered if module else None}
    return {}


def _module(name: str) -> Any:
    return getattr(keras, name.removeprefix("keras."))


def _arguments(found: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class as Keras 3 takes them."""
    shape = own.pop("batch_input_shape", None)
    if found["class_name"] == "InputLayer" and shape is not None:
        own["batch_shape"] = shape
    if found["class_name"] == "LeakyReLU" and "alpha" in own:
        own["negative_slope"] = own.pop("alpha")
    if isinstance(own.get("axis"), list) and len(own["axis"]) == 1:
        (own["axis"],) = own["axis"]
    if found.get("module") == "keras.losses":
        own.pop("fn", None)
        own["reduction"] = {"auto": "sum_over_batch_size"}.get(own.get("reduction", "auto"), own.get("reduction"))
    if isinstance(own.get("layers"), list):
        _translate_calls(own)
    kind = _public_class(found)
    return own if kind is None else {name: value for name, value in own.items() if not _is_gone(kind, name, value)}


def _is_gone(kind: type, name: str, value: object) -> bool:
    """Return whether a class has an argument no more that had no effect."""
    had_effect = not (value is None or value is False or name in _GONE or (name, value) == ("groups", 1))
    return name not in _parameters(kind) and not had_effect


@functools.cache
def _parameters(kind: type) -> frozenset[str]:
    """Return the named parameters of a class and, where it passes on others, of its bases."""
    found: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            found |= parameters.keys()
            if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
                break
    return frozenset(found)


def _public_class(found: Mapping[str, Any]) -> type | None:
    if found.get("module") not in {"keras.layers", *_MODULES.values()}:
        return None
    kind = getattr(_module(found["module"]), found["class_name"], None)
    return kind if isinstance(kind, type) else None


def _translate_calls(model: dict[str, Any]) -> None:
    """Translate the calls of the layers in a functional model.

    For Keras 2 the first call of a model was that on its own inputs, and one input or output was a list.
    """
    layers = [layer for layer in model["layers"] if isinstance(layer, dict)]
    models = {layer.get("name"): layer.get("class_name") for layer in layers if _has_input(layer)}
    for place in ("input_layers", "output_layers"):
        # Keras 3 itself counts the calls of functional models in this way here.
        _count_from_zero(model.get(place), {name for name, kind in models.items() if kind == "Sequential"})
        if isinstance(model.get(place), list) and len(model[place]) == 1:
            (model[place],) = model[place]
    for layer in layers:
        if isinstance(layer.get("inbound_nodes"), list):
            _count_from_zero(layer["inbound_nodes"], models.keys())
            is_recurrent = layer.get("class_name") in _RECURRENT
            layer["inbound_nodes"] = [_call(call, is_recurrent=is_recurrent) for call in layer["inbound_nodes"]]


def _has_input(layer: Mapping[str, Any]) -> bool:
    """Return whether a layer is a model that has inputs of its own."""
    inner = (layer.get("config") or {}).get("layers") or [{}]
    return layer.get("class_name") in {"Sequential", *_MODELS} and inner[0].get("class_name") == "InputLayer"


def _count_from_zero(references: Any, models: Collection[Any]) -> None:
    """Subtract 1 from the call in every reference to one of these models."""
    waiting = [references]
    while models and waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
            if _is_reference(value) and value[0] in models:
                value[1] -= 1


def _call(call: Any, *, is_recurrent: bool) -> Any:
    """Return the call of a layer as Keras 3 writes it, if arguments besides the first are tensors, too.

    Keras 2 lists the tensors of the first argument, each with the other arguments, which it repeats. The initial state
    of a recurrent layer follows its input there.
    """
    if not isinstance(call, list) or not call or not all(_is_reference(tensor) for tensor in call):
        return call
    others: dict[str, Any] = next((tensor[_ALONE] for tensor in call if len(tensor) > _ALONE), {})
    has_state = is_recurrent and len(call) > 1
    if not has_state and not any(_is_reference(value) for value in others.values()):
        return call
    tensors = [_tensor(reference) for reference in call]
    named = {name: _tensor(value) if _is_reference(value) else value for name, value in others.items()}
    if has_state:
        return {"args": tensors[:1], "kwargs": {**named, "initial_state": tensors[1:]}}
    return {"args": tensors if len(tensors) == 1 else [tensors], "kwargs": named}


def _tensor(reference: list[Any]) -> dict[str, Any]:
    """Return a tensor of a model as Keras 3 writes it; shape and type are those of the layer's result."""
    config = {"shape": [], "dtype": "float32", "keras_history": reference[:_ALONE]}
    return {"class_name": "__keras_tensor__", "config": config}


def _is_reference(value: object) -> bool:
    """Return whether a value names the result of a call: the layer, which call, which result, and other arguments."""
    return (
        isinstance(value, list)
        and len(value) in (_ALONE, _ALONE + 1)
        and isinstance(value[0], str)
        and all(isinstance(each, int) for each in value[1:_ALONE])
    )


def _wrapped_metric(found: Mapping[str, Any]) -> Any:
    """Return the class of a metric that Keras 2 saved as the function that it averages."""
    own = dict(found["config"])
    function = own.pop("fn", None)
    kind = "".join(word.capitalize() for word in str(function).split("_"))
    if not isinstance(function, str) or not hasattr(keras.metrics, kind):
        return found
    return {"module": "keras.metrics", "class_name": kind, "config": own, "registered_name": None}
