"""What a stored model may name: Keras's classes and functions, and a SavedModel's operations.

Keras looks up what a configuration names and calls it with the file's arguments; its safe mode refuses only what is
known to be harmful. Here a configuration may name Keras's classes of layers, initializers, metrics and so on, Keras's
functions of tensors, and what the experiment or an installed package registered with Keras. Of Keras's own classes,
those that run code or read files outside of the model are excluded.

Of a SavedModel's operations, those that compute are accepted: those without state, apart from the ones below, and those
whose state is variables, tables in memory, random numbers or control flow. What reads or writes files, opens
connections or calls Python is excluded.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, Final

import keras

from understudy.compat import exported_by_keras, is_saveable, is_stateful, named_by_older_configurations
from understudy.evaluator.evaluator_errors import LoadError

_CLASS_MODULES: Final = (
    keras.constraints,
    keras.dtype_policies,
    keras.initializers,
    keras.layers,
    keras.losses,
    keras.metrics,
    keras.models,
    keras.optimizers,
    keras.optimizers.schedules,
    keras.quantizers,
    keras.random,
    keras.regularizers,
)
"""The public modules whose classes a configuration may name."""

_SAVEABLE_PACKAGES: Final = (
    "keras.src.activations.",
    "keras.src.applications.",
    "keras.src.layers.",
    "keras.src.legacy.",
    "keras.src.losses.",
    "keras.src.metrics.",
    "keras.src.models.",
    "keras.src.ops.",
    "keras.src.optimizers.",
    "keras.src.quantizers.",
    "keras.src.random.",
    "keras.src.trainers.",
)
"""The packages whose classes of layers and operations Keras stores by their private names."""

_FUNCTION_MODULES: Final = (keras.activations, keras.losses, keras.metrics)
_NO_FUNCTIONS_OF_TENSORS: Final = frozenset({"get", "serialize", "deserialize"})

_HARMFUL_CLASSES: Final = frozenset({"FlaxLayer", "JaxLayer", "Lambda", "TFSMLayer", "TorchModuleWrapper"})
_CALLING: Final = frozenset(
    {
        "AssociativeScan",
        "Cond",
        "CustomGradient",
        "ForiLoop",
        "JVP",
        "Map",
        "Scan",
        "Switch",
        "VectorizedMap",
        "WhileLoop",
    }
)
"""Operations that call functions given to them."""

_NO_PACKAGES: Final = frozenset({"", "__main__", "builtins", "keras"})

_VALUES: Final = frozenset({"__bytes__", "__ellipsis__", "__keras_tensor__", "__numpy__", "__slice__", "__tensor__"})
"""What Keras stores as if it were a class, and is only a value."""

_PATHS: Final = ("vocabulary", "idf_weights")
_LOOKUPS: Final = frozenset({"IndexLookup", "IntegerLookup", "StringLookup", "TextVectorization"})


def check_config(config: object, file_name: str, *, advice: str = "") -> None:
    """Check everything that a model's configuration names, including its compile configuration.

    Args:
        config: The configuration.
        file_name: The file it is from.
        advice: What may help, too; a sentence without a period.

    Raises:
        LoadError: It names something else. The text names it, and what to do.
    """
    for node in _nodes(config):
        refusal = _refusal(node)
        if refusal is not None:
            raise LoadError("; ".join(filter(None, (f"{file_name} {refusal}", advice, _remedy(node), _TRUST))))


_TRUST: Final = "if you trust who wrote it, start the service with --allow-unsafe-models"
_EVEN_OLDER: Final = "start with --experiment, with which the checkpoints that are there can be loaded, too"
_REGISTER: Final = (
    f"if it is your own, put @keras.saving.register_keras_serializable() before it in the experiment's file and "
    f"{_EVEN_OLDER}"
)


def _remedy(node: Mapping[str, Any]) -> str:
    """Return how an object becomes accepted: its package registers it when it is imported, or its author has to."""
    package = str(node.get("module") or "").partition(".")[0]
    if ">" not in str(node.get("registered_name")) or package in _NO_PACKAGES or not package.isidentifier():
        return _REGISTER
    return (
        f"if it is the package {package} that registers it, import {package} in the experiment's file and {_EVEN_OLDER}"
    )


def _nodes(config: object) -> Iterator[Mapping[str, Any]]:
    """Yield every serialized object in a configuration."""
    waiting = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "class_name" in value:
                yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _refusal(node: Mapping[str, Any]) -> str | None:
    """Return why an object is not accepted, or None."""
    kind, module, config = node["class_name"], node.get("module"), node.get("config")
    is_function = kind == "function"
    name = config if is_function else kind
    if not isinstance(name, str) or not isinstance(module, str | None):
        return "names a class or a function by something else than texts"
    if kind == "__lambda__":
        return "holds a Python lambda, which is code"
    if kind in _VALUES or _is_registered(name, node, is_function=is_function):
        return None
    found = [*_resolve(name, module)]
    if not found or not all(map(_is_accepted_function if is_function else _is_accepted_class, found)):
        what = name if module in (None, "builtins") else f"{module}.{name}"
        expected = (
            "class of Keras" if not is_function else "function of keras.activations, keras.losses or keras.metrics"
        )
        return f"names {what!r}, which is not an accepted {expected}, nor registered"
    return _path_in(kind, config)


def _path_in(kind: str, config: object) -> str | None:
    if kind in _LOOKUPS and isinstance(config, dict):
        for name in _PATHS:
            if isinstance(config.get(name), str):
                return f"has a {kind} layer whose {name} is the file {config[name]!r}"
    return None


def _is_registered(name: str, node: Mapping[str, Any], *, is_function: bool) -> bool:
    """Return whether Keras will take what is registered, rather than look up the name in a module."""
    if is_function:
        compatible = node.get("module") == "builtins" and any(
            known.endswith(f">{name}") for known in keras.saving.get_custom_objects()
        )
        return _registered(name) or compatible
    if "module" in node:
        return _registered(node.get("registered_name", name))
    return _registered(name) or (name not in _by_short_name() and _registered(node.get("registered_name")))


def _registered(name: object) -> bool:
    return isinstance(name, str) and keras.saving.get_registered_object(name) is not None


def _resolve(name: str, module: str | None) -> Iterator[Any]:
    """Yield every object that Keras may look up by these names, without importing anything."""
    if module is None:  # the older format has no modules
        yield from _by_short_name().get(name, ())
        return
    if module == "builtins":
        yield from (vars(package)[name] for package in _FUNCTION_MODULES if name in vars(package))
        return
    found = exported_by_keras(f"{module}.{name}")
    if found is None and module.startswith("keras."):
        found = vars(sys.modules.get(module, object)).get(name)
    if found is not None:
        yield found


@functools.cache
def _by_short_name() -> Mapping[str, list[Any]]:
    """Return what the older format may name, without a module."""
    found: dict[str, list[Any]] = {}
    for names in (*map(vars, _CLASS_MODULES + _FUNCTION_MODULES), named_by_older_configurations()):
        for name, thing in names.items():
            if callable(thing):
                found.setdefault(name, []).append(thing)
    return found


@functools.cache
def _accepted_classes() -> frozenset[Any]:
    return frozenset(thing for package in _CLASS_MODULES for thing in vars(package).values() if isinstance(thing, type))


@functools.cache
def _accepted_functions() -> tuple[Any, ...]:
    return tuple(
        thing
        for package in _FUNCTION_MODULES
        for name, thing in vars(package).items()
        if isinstance(thing, FunctionType) and name not in _NO_FUNCTIONS_OF_TENSORS
    )


def _is_accepted_class(thing: Any) -> bool:
    if not isinstance(thing, type) or any(base.__name__ in _HARMFUL_CLASSES | _CALLING for base in thing.__mro__):
        return False
    if thing in _accepted_classes():
        return True
    return is_saveable(thing) and thing.__module__.startswith(_SAVEABLE_PACKAGES)


def _is_accepted_function(thing: Any) -> bool:
    return any(thing is accepted for accepted in _accepted_functions())


_WITH_STATE: Final = re.compile(
    r"VarHandleOp|VariableV2|Variable|TemporaryVariable|VarIsInitializedOp|VariableShape"
    r"|DestroyResourceOp|DisableCopyOnRead|ReadVariableOp"
    r"|Assign\w*|Resource(Apply|SparseApply|Gather|Scatter|StridedSlice)\w*|ResourceCountUpTo"
    r"|(Anonymous)?(Mutable(Dense)?)?HashTable(OfTensors)?(V2)?|InitializeTableV2|LookupTable\w+V2"
    r"|StatefulPartitionedCall|If|While|Case|Assert|CheckNumerics(V2)?|Print(V2)?|GuaranteeConst|Empty|DeviceIndex"
    r"|TensorArray\w*|Stack\w*|Random(Crop|Gamma|Poisson|PoissonV2|Shuffle|StandardNormal|Uniform|UniformInt)"
    r"|Stateful(RandomBinomial|StandardNormal|StandardNormalV2|TruncatedNormal|Uniform|UniformFullInt|UniformInt)"
    r"|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|NonDeterministicInts|Rng(ReadAndSkip|Skip)"
    r"|StatelessRandomGetAlg|SampleDistortedBoundingBox(V2)?|\w*CandidateSampler"
    r"|CudnnRNN\w*|\w*SparseFromTensorsMap|\w*SparseToTensorsMap|Timestamp"
)
"""The accepted operations with state."""

_EXCLUDED: Final = re.compile(
    r"ReadFile|MatchingFiles|PyFuncStateless|Reader\w+|\w*Dataset\w*|\w*Iterator\w*|Debug\w*|Copy|CopyHost"
    r"|(Decode|Encode)Proto\w*|GenerateVocabRemapping|\w*Summary(V2)?|InitializeTableFromTextFile"
)
"""The excluded operations without state."""

_RESTORING: Final = frozenset({"RestoreV2", "Restore", "RestoreSlice", "MergeV2Checkpoints", "ShardedFilename"})


def check_operations(found: Mapping[str, Any], folder_name: str) -> None:
    """Check what `understudy.checkpoints.inspection.graph.inspect_saved_model` found.

    Raises:
        LoadError: The model executes an operation that is not accepted. The text names it and where it is.
    """
    for problem in found["problems"]:
        raise LoadError(f"{folder_name}: {problem}; {_TRUST}")
    for part, extra in (("operations", frozenset[str]()), ("restoring", _RESTORING)):
        for operation, place in found[part].items():
            if operation not in extra and not _is_accepted_operation(operation):
                raise LoadError(
                    f"{folder_name} executes {operation!r} ({place}), which is not one of the accepted operations: "
                    f"it may read or write files; {_TRUST}"
                )


def _is_accepted_operation(operation: str) -> bool:
    if _WITH_STATE.fullmatch(operation):
        return True
    # An operation that TensorFlow does not know is a function of the model, or TensorFlow refuses it.
    return not is_stateful(operation) and not _EXCLUDED.fullmatch(operation)
