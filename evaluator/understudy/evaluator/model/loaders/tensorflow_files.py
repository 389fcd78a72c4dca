"""Loads SavedModel folders, and variables alone into the model that the user's experiment builds."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from understudy.checkpoints.formats.saved_model import KERAS_METADATA_FILE
from understudy.checkpoints.kinds import ModelKind
from understudy.compat import parse_object_graph, parse_saved_model, uncompile
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.allowlists import check_config
from understudy.evaluator.model.loaders.keras_metadata import read_compilation
from understudy.evaluator.model.loaders.loader import BuiltModel
from understudy.evaluator.model.weights import assign_from_hdf5

_log = logging.getLogger(__name__)

_SERVING = "serving_default"
_INITIALIZER = "__saved_model_init_op"
_GRAPH_FILE = "saved_model.pb"

_OF_KERAS_2 = "layer_with_weights-"
"""How the names begin under which models of Keras 2 have their layers in checkpoints; those of Keras 3 do not."""

_MADE_UP = re.compile(r"(?:keras_tensor|input_layer)(?:_(\d+))?")
"""The names that `keras.Model.export` gives to unnamed inputs: they contain per-process counters."""


class SavedModelLoader:
    """See `ModelLoader`. A SavedModel has no compile configuration, but for what Keras 2 saves beside it.

    Its graph holds constants (for example the statistics of a ``Normalization`` layer) that differ between checkpoints.
    Therefore each is loaded with its own graph, which requires retracing, and checkpoints have the same architecture if
    they have the same inputs and outputs. Unnamed inputs are called ``inputs``, ``inputs_1`` and so on, in order, as
    `tf.saved_model.save` names all inputs of a Keras model.
    """

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`."""
        signatures = _read_signatures(model_file)
        signature = signatures[_choose(signatures, model_file)]
        inputs = {name: signature.inputs[own] for own, name in _served_names(signature.inputs).items()}
        content: list[Any] = [_described(inputs), _described(signature.outputs)]
        if compilation := _compilation(model_file):
            content.append(compilation)
        return hashlib.sha256(json.dumps(["SavedModel", *content]).encode()).hexdigest()

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        name = _choose(_read_signatures(model_file), model_file)
        try:
            loaded = tf.saved_model.load(str(model_file))
            model = _as_keras(loaded, loaded.signatures[name])
            return BuiltModel(model=model, compile_config=_compilation(model_file))
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"{model_file.name} cannot be built: {first_line(error)}") from error

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        del model, model_file
        return False


def _compilation(folder: Path) -> dict[str, Any]:
    """Return the compile arguments that Keras 2 saved beside a SavedModel; empty if there are none that may be used."""
    try:
        found = read_compilation(folder)
        check_config(found, KERAS_METADATA_FILE)
    except LoadError as error:
        _log.warning("a SavedModel cannot be scored by the losses and metrics that were saved with it: %s", error)
        return {}
    return found


class _SignatureLayer(keras.layers.Layer):
    """Runs one signature of a SavedModel, and owns its variables."""

    def __init__(self, loaded: Any, signature: Any) -> None:
        super().__init__(name=_SERVING)
        self._loaded = loaded
        self._signature = signature
        self._own = [
            keras.Variable(variable, trainable=False, dtype=variable.dtype.name, name=f"variable_{index}")
            for index, variable in enumerate(signature.variables)
        ]

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """Return the outputs by name."""
        names = _served_names(self._signature.structured_input_signature[1])
        return self._signature(**{own: inputs[name] for own, name in names.items()})


def _as_keras(loaded: Any, signature: Any) -> Any:
    """Return a functional model with a signature's inputs and outputs."""
    specs = signature.structured_input_signature[1]
    inputs = {name: _input(name, specs[own]) for own, name in _served_names(specs).items()}
    return keras.Model(inputs, _SignatureLayer(loaded, signature)(inputs))


def _input(name: str, spec: Any) -> Any:
    if spec.shape.rank is None or spec.shape.rank == 0 or spec.shape[0] is not None:
        raise LoadError(
            f"input {name!r} of the SavedModel has shape {spec.shape}; one with an open first axis, the batch, was "
            "expected: export the model with a batch size of None"
        )
    return keras.Input(spec.shape[1:], dtype=spec.dtype.name, name=name)


def _read_signatures(model_file: Path) -> dict[str, Any]:
    try:
        (graph, *_) = parse_saved_model((model_file / _GRAPH_FILE).read_bytes()).meta_graphs
    except Exception as error:
        raise LoadError(f"{model_file.name} is not a SavedModel: {first_line(error)}") from error
    return {name: signature for name, signature in graph.signature_def.items() if name != _INITIALIZER}


def _choose(signatures: Mapping[str, Any], model_file: Path) -> str:
    """Return the name of the signature to serve."""
    if _SERVING in signatures:
        return _SERVING
    if len(signatures) == 1:
        return next(iter(signatures))
    raise LoadError(f"{model_file.name} has the signatures {sorted(signatures)}; one called {_SERVING!r} was expected")


def _served_names(names: Iterable[str]) -> dict[str, str]:
    """Return the served names of a signature's inputs, by their own names."""
    own = {name: _MADE_UP.fullmatch(name) for name in names}
    made_up = sorted((int(match[1] or 0), name) for name, match in own.items() if match)
    renamed = {name: f"inputs_{place}" if place else "inputs" for place, (_, name) in enumerate(made_up)}
    taken = {name for name, match in own.items() if match is None}
    return {name: name if taken & set(renamed.values()) else renamed.get(name, name) for name in own}


def _described(tensors: Mapping[str, Any]) -> list[tuple[str, int, list[int]]]:
    return [
        (name, tensor.dtype, [dimension.size for dimension in tensor.tensor_shape.dim])
        for name, tensor in sorted(tensors.items())
    ]


_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class VariablesLoader:
    """See `ModelLoader`.

    Args:
        kind: How the variables are stored.
        build_model: Builds the model.
        assign: Assigns the variables of a file to a model; may raise anything.
    """

    def __init__(self, kind: ModelKind, build_model: Callable[[], Any], assign: Callable[[Any, Path], None]) -> None:
        self._kind = kind
        self._build_model = build_model
        self._assign = assign

    def architecture_of(self, model_file: Path) -> str:
        """See `ModelLoader`. The model is always the experiment's."""
        del model_file
        return f"the experiment's, of {self._kind.value}"

    def build(self, model_file: Path) -> BuiltModel:
        """See `ModelLoader`."""
        try:
            built = _uncompiled(self._build_model())
        except Exception as error:
            raise LoadError(f"the experiment's model cannot be built: {first_line(error)}") from error
        self.assign(built.model, model_file)
        return built

    def assign(self, model: Any, model_file: Path) -> bool:
        """See `ModelLoader`."""
        try:
            self._assign(model, model_file)
        except Exception as error:
            raise LoadError(
                f"the variables of {model_file.name} are not those of the experiment's model: {first_line(error)}; "
                "start the evaluator with the experiment that builds theirs, and it tries them again"
            ) from error
        return True


def assign_weights(model: Any, model_file: Path) -> None:
    """Assign the content of a ``.weights.h5`` file."""
    assign_from_hdf5(model, model_file)


def assign_checkpoint(model: Any, prefix: Path) -> None:
    """Assign a checkpoint of `tf.train.Checkpoint`: of the model itself, or of an object that contains the model.

    Raises:
        ValueError: No object in it has all the variables of the model.
    """
    graph = parse_object_graph(tf.train.load_checkpoint(str(prefix)).get_tensor(_OBJECT_GRAPH))
    if any(child.local_name.startswith(_OF_KERAS_2) for node in graph.nodes for child in node.children):
        raise ValueError(
            "Keras 2 saved them, in places of its own; have it save .weights.h5 files or whole models, which are read"
        )
    reasons = []
    for checkpoint in _roots(model, graph):
        try:
            checkpoint.read(str(prefix)).expect_partial().assert_existing_objects_matched()
        except AssertionError as error:
            reasons.append(first_line(error))
            continue
        return
    raise ValueError("; ".join(reasons))


def _roots(model: Any, graph: Any) -> Iterator[tf.train.Checkpoint]:
    """Yield the ways in which a checkpoint with this object graph may contain the model, the likeliest first."""
    names = [child.local_name for child in graph.nodes[0].children]
    if "model" in names:
        yield tf.train.Checkpoint(model=model)
    yield tf.train.Checkpoint(model)
    for name in names:
        if name.isidentifier() and not name.startswith("_") and name not in {"model", "save_counter", "optimizer"}:
            yield tf.train.Checkpoint(**{name: model})


def _uncompiled(model: Any) -> BuiltModel:
    """Return the model without its compilation, and its compile arguments."""
    config = model.get_compile_config() if model.compiled else None
    uncompile(model)
    return BuiltModel(model=model, compile_config=config or {})
