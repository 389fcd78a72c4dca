"""The private names of Keras and TensorFlow that this project uses, each behind one function.

No other module names them; `tests/compat` checks that, and has a test for each name that shows whether it still does
what is needed here. A function whose name is gone raises `PrivateNameError`, which gives the name, the reason for its
use, and the versions below. Keras and TensorFlow are imported when a function is called.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

TRIED: Mapping[str, tuple[str, ...]] = {"keras": ("3.15.1",), "tensorflow": ("2.21.0",)}
"""The versions that `tests/compat` passed with."""

_MASK = "_keras_mask"
_READS_WEIGHTS = "to read weights without blocking other threads"
_READS_CONFIGURATIONS = "to check what a model's configuration names"
_READS_MESSAGES = "to read a checkpoint's description"
_COMPILED = ("optimizer", "loss", "_compile_loss", "_compile_metrics", "_loss_tracker")


class PrivateNameError(ImportError):
    """A private name that this project needs is gone. The text says which, what for, and which versions have it."""


def functional_graph(model: Any) -> Any | None:
    """Return the functional model that a Keras model is or contains, with nested structures; None for a subclass.

    Reason: the public ``inputs`` and ``outputs`` of a sequential model are flat, and `keras.Model` is the only public
    base class of functional models.
    """
    import keras

    if isinstance(model, keras.Sequential):
        model = _private(model, "_functional", "to describe a sequential model")
    functional = _private(_module("keras.src.models"), "Functional", "to recognize functional models")
    return model if isinstance(model, functional) else None


def operation_of(tensor: Any) -> Any:
    """Return the layer that computes a symbolic tensor of a functional model.

    Reason: a `keras.KerasTensor` refers to its layer nowhere else.
    """
    return _private(tensor, "_keras_history", "to name inputs and outputs").operation


def layers_of(model: Any) -> list[Any]:
    """Return all layers of a model, including layers within layers.

    Reason: `keras.Model.layers` has only the outermost, and a layer has no such attribute.
    """
    return list(_private(model, "_flatten_layers", "to find layers within layers")())


def mask_of(tensor: Any) -> Any:
    """Return the mask that a layer set on a tensor, or None.

    Reason: a mask is an attribute of the tensor, which is lost when the tensor is copied.
    """
    return getattr(tensor, _MASK, None)


def put_mask(tensor: Any, mask: Any) -> None:
    """Set a tensor's mask, where losses and metrics expect it. Reason: as for `mask_of`."""
    setattr(tensor, _MASK, mask)


def loss_for(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Return the loss object that `keras.Model.compile` makes of a loss argument: an object, a function or a name.

    Reason: the public `keras.losses.get` returns a function for a name, without the wrapper that averages and masks.
    """
    return _private(_module("keras.src.trainers.compile_utils"), "get_loss", "for the losses of examples")(
        loss, y_true, y_pred
    )


def compiled_loss(model: Any) -> Any:
    """Return the compiled loss, a function of targets, outputs and weights; None if the model has none.

    It weights several outputs, and adds no regularization terms. Reason: the public `keras.Model.compute_loss` adds up
    the examples.
    """
    return _private(model, "_compile_loss", "for the losses of examples")


def compiled_metrics(model: Any) -> Any | None:
    """Return the compiled metrics of a model as one metric, or None if it has none.

    Reason: `keras.Model.metrics` lists them with the loss, and does not say which output each of them is of.
    """
    return _private(model, "_compile_metrics", "to reduce the metrics of several workers")


def metrics_with_values(compiled: Any, y_true: Any, y_pred: Any) -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield the metrics that `compiled_metrics` returned, each with its output and with the values that it is given.

    Reason: its public ``metrics`` do not say which output each of them is of.

    Returns:
        The metric, the name of its output, its targets and its predictions; nothing before the first update.
    """
    if not compiled.built:
        return
    purpose = "to say which metric values do not fit"
    flatten = _private(compiled, "_flatten_y", purpose)
    names = compiled.output_names or [""]
    for attribute in ("_flat_metrics", "_flat_weighted_metrics"):
        lists = _private(compiled, attribute, purpose)
        values = zip(lists, flatten(y_true), flatten(y_pred), strict=True)
        for metrics, target, prediction in values:
            for metric in metrics.metrics if metrics else ():
                yield metric, metrics.output_name or names[0], target, prediction


def uncompile(model: Any) -> None:
    """Remove what `keras.Model.compile` sets on a model, so that a checkpoint need not contain it.

    Reason: Keras cannot undo ``compile``.
    """
    for attribute in _COMPILED:
        if hasattr(model, attribute):
            delattr(model, attribute)  # else TensorFlow still tracks its variables
            setattr(model, attribute, None)
    model.compiled = False


def build_for(model: Any, batch_spec: Any) -> None:
    """Create the variables of a compiled model, its metrics and its optimizer for such batches, as ``fit`` does.

    Reason: otherwise metrics create their variables at the first update, which is inside a training loop's graph.
    """
    _private(model, "_symbolic_build", "to create variables before the first step")(data_batch=batch_spec)


@contextmanager
def without_automatic_xla() -> Iterator[None]:
    """Make ``jit_compile="auto"``, the default of `keras.Model.compile`, mean False. Not thread-safe.

    Reason: a compiled model no longer shows whether ``jit_compile`` was ``"auto"`` or True.
    """
    trainer = _private(_module("keras.src.trainers.trainer"), "Trainer", "to switch automatic XLA off")
    resolve = _private(trainer, "_resolve_auto_jit_compile", "to switch automatic XLA off")
    trainer._resolve_auto_jit_compile = lambda _: False  # noqa: SLF001
    try:
        yield
    finally:
        trainer._resolve_auto_jit_compile = resolve  # noqa: SLF001


def leave_gradients_as_they_are(optimizer: Any) -> None:
    """Make an optimizer apply gradients that are already added up over the replicas.

    Reason: Keras 2 had an argument for it, Keras 3 has none.
    """
    _private(optimizer, "_all_reduce_sum_gradients", "to clip the gradient of the whole batch")
    optimizer._all_reduce_sum_gradients = list  # noqa: SLF001


def convert_for_examples() -> None:
    """Let `tf.vectorized_map` compute the operations Bitcast and InTopKV2 for many elements at once.

    Reason: TensorFlow has no rules for them, and would compute the elements one after another. Keras finds the class of
    the highest score with the first, and whether a class is among the best with the second.
    """
    import tensorflow as tf

    pfor = _module("tensorflow.python.ops.parallel_for.pfor")
    purpose = "to compute the metrics of single examples"
    known = _private(pfor, "_pfor_converter_registry", purpose)
    wrap = _private(pfor, "wrap", purpose)

    def convert_bitcast(operation: Any) -> Any:
        return wrap(tf.bitcast(operation.stacked_input(0), operation.get_attr("type")), True)

    def convert_in_top_k(operation: Any) -> Any:
        operation.stack_inputs()
        scores, classes, best = (operation.input(place).t for place in range(3))
        together = tf.reshape(scores, [-1, tf.shape(scores)[-1]])
        held = tf.raw_ops.InTopKV2(predictions=together, targets=tf.reshape(classes, [-1]), k=tf.reshape(best, [-1])[0])
        return wrap(tf.reshape(held, tf.shape(classes)), True)

    for name, convert in {"Bitcast": convert_bitcast, "InTopKV2": convert_in_top_k}.items():
        if name not in known:
            _private(pfor, "RegisterPFor", purpose)(name)(convert)


@functools.cache
def repair_open_axes() -> None:
    """Make `keras.layers.TimeDistributed` and `UpSampling2D` right where axes are of unknown length when it is traced.

    Reason: the first loops over as many time steps as there are examples then, and gives wrong outputs or none; the
    second asks whether a symbolic size is positive, and fails.
    """
    import keras

    over_time, larger = keras.layers.TimeDistributed, keras.layers.UpSampling2D
    over_time.call = _over_time(over_time.call)
    larger.call = _enlarged(larger.call)


def _over_time(known_steps: Callable[..., Any]) -> Callable[..., Any]:
    import keras

    purpose = "to call a layer for every time step"

    @functools.wraps(known_steps)
    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if inputs.shape[1] is not None:
            return known_steps(self, inputs, training=training, mask=mask)
        steps = keras.ops.swapaxes(inputs, 0, 1)
        masks = None if mask is None else keras.ops.swapaxes(mask, 0, 1)

        def step(index: Any) -> Any:
            options = {}
            if masks is not None and _private(self.layer, "_call_has_mask_arg", purpose):
                options["mask"] = masks[index]
            if _private(self.layer, "_call_has_training_arg", purpose):
                options["training"] = training
            return self.layer.call(steps[index], **options)

        outputs = keras.ops.vectorized_map(step, keras.ops.arange(keras.ops.shape(steps)[0]))
        return keras.ops.swapaxes(outputs, 0, 1)

    return call


def _enlarged(known_size: Callable[..., Any]) -> Callable[..., Any]:
    import keras
    import tensorflow as tf

    @functools.wraps(known_size)
    def call(self: Any, inputs: Any) -> Any:
        if self.interpolation == "nearest" or None not in inputs.shape[1:] or not isinstance(inputs, tf.Tensor):
            return known_size(self, inputs)
        channels_last = [0, 2, 3, 1] if self.data_format == "channels_first" else [0, 1, 2, 3]
        images = keras.ops.transpose(inputs, channels_last)
        height, width = tf.unstack(tf.shape(images)[1:3] * self.size)
        resized = tf.cast(tf.image.resize(images, (height, width), method=self.interpolation), inputs.dtype)
        return keras.ops.transpose(resized, [channels_last.index(axis) for axis in range(4)])

    return call


def worker_count(strategy: Any) -> int:
    """Return the number of workers of a `tf.distribute.ParameterServerStrategy`.

    Reason: the public ``cluster_resolver`` of this strategy is None.
    """
    return int(_private(strategy.extended, "_num_workers", "to wait for all workers"))


def clear_kernels() -> None:
    """Free the kernels of all functions; functions in use create theirs again at the next call.

    Reason: the kernels of a function that was called as an operation outlive it, and no public API frees them.
    """
    _private(_eager_context(), "clear_kernel_cache", "to free the kernels of dropped models")()


def call_flat(function: Any) -> Callable[..., Any]:
    """Return a function that calls a concrete function with flat tensors, followed by its captured inputs.

    Reason: calling the concrete function itself binds and checks its arguments in Python, which takes longer than a
    small model computes. Public fallback: the concrete function.
    """
    inference = _private(function, "inference_fn", "to call functions without checks in Python")
    return _private(inference, "call_flat", "to call functions without checks in Python")  # type: ignore[no-any-return]


def constants_for_variables(function: Any, variables: Iterable[Any]) -> tuple[Any, frozenset[int]]:
    """Return a concrete function's graph with constants for variables, and with the functions that it calls inlined.

    Loops and branches keep functions of their own, in the graph's library. Reason: TensorFlow's converter,
    ``convert_variables_to_constants_v2``, is not public. As a whole it replaces functions of the same names that other
    threads may be running, and it misses variables of restored functions on several devices; this is its first half.

    Args:
        function: The function.
        variables: Its variables, each on one device; others are left.

    Returns:
        The `tf.compat.v1.GraphDef`, and the positions of the captured inputs that became constants.
    """
    import tensorflow as tf

    why = "to make constants of variables"
    converter = _module("tensorflow.python.framework.convert_to_constants")
    function.graph.clear_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS)  # None of them, which cannot be written
    known = {id(variable) for variable in function.graph.variables}
    function.graph.variables = (*function.graph.variables, *(v for v in variables if id(v) not in known))
    data = _private(converter, "_FunctionConverterDataInEager", why)(
        func=function, lower_control_flow=False, aggressive_inlining=True
    )
    graph, converted = _private(converter, "_replace_variables_by_constants", why)(data)
    return graph, frozenset(converted)


def add_function(definition: Any) -> None:
    """Add a function of a graph's library to those that the runtime can call.

    Reason: a graph that is imported into a `tf.function` brings such functions, and the runtime does not learn of them.
    """
    _private(_eager_context(), "add_function_def", "to run loops and branches of imported graphs")(definition)


def remove_function(name: str) -> None:
    """Remove a function that `add_function` added. Reason: as for `add_function`."""
    _private(_eager_context(), "remove_function", "to free the functions of imported graphs")(name)


def plain_variable(value: Any) -> Any:
    """Return a variable on the current device, also within a strategy's scope.

    Reason: within the scope, `tf.Variable` creates a variable on every replica.
    """
    kind = _private(
        _module("tensorflow.python.ops.resource_variable_ops"), "ResourceVariable", "to copy weights in pieces"
    )
    return kind(value, trainable=False)


def bound_cluster_registration(jobs: Mapping[str, Sequence[str]], seconds: float) -> None:
    """Bound the wait of TensorFlow's coordination service for a missing task, an hour by default.

    The configuration is MultiWorkerMirroredStrategy's own, which it keeps if it finds one. Reason: the strategy has no
    argument for the time.

    Args:
        jobs: The addresses of each job's tasks.
        seconds: How long to wait.
    """
    import tensorflow as tf

    why = "to bound the wait for other workers"
    leader = _private(_module("tensorflow.python.distribute.multi_worker_util"), "coordination_leader", why)
    job = _private(_module("tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2"), "CoordinatedJob", why)
    eager = _eager_context()
    _private(eager, "configure_coordination_service", why)(
        service_type="standalone",
        service_leader=leader(tf.train.ClusterSpec(jobs)),
        cluster_register_timeout_in_ms=int(seconds * 1000),
        coordinated_jobs=[job(name=name, num_tasks=len(addresses)) for name, addresses in jobs.items()],
    )
    _private(eager, "coordination_service", why).cluster_register_with_barrier = True


def parse_saved_model(content: bytes) -> Any:
    """Parse ``saved_model.pb``, without building its graphs. Reason: `tf.saved_model.load` builds them, in seconds."""
    return _message("saved_model_pb2", "SavedModel").FromString(content)


def parse_bundle_entry(content: bytes) -> Any:
    """Parse an entry of the index of a `tf.train.Checkpoint`.

    Reason: `tf.train.load_checkpoint` reads such an index, but allocates what it declares.
    """
    return _message("tensor_bundle_pb2", "BundleEntryProto").FromString(content)


def data_type_name(number: int) -> str:
    """Return the name of a data type in a message, such as ``DT_FLOAT``. Reason: as for `parse_bundle_entry`."""
    return str(_private(_module("tensorflow.core.framework.types_pb2"), "DataType", _READS_MESSAGES).Name(number))


def unpack_asset(packed: Any) -> Any | None:
    """Return the description of an asset in the graph that TensorFlow 1 wrote, or None if it is something else.

    Reason: as for `parse_saved_model`.
    """
    asset = _message("meta_graph_pb2", "AssetFileDef")()
    return asset if packed.Unpack(asset) else None


def is_stateful(operation: str) -> bool | None:
    """Return whether an operation of TensorFlow has state or effects; None if TensorFlow does not know it.

    Reason: no public API describes operations without a graph that has them.
    """
    why = "to find operations that use files"
    definition = _private(_module("tensorflow.python.framework.op_def_registry"), "get", why)(operation)
    return None if definition is None else bool(definition.is_stateful)


def parse_fingerprint(content: bytes) -> Any:
    """Parse a SavedModel's ``fingerprint.pb``.

    Reason: the public ``read_fingerprint`` crashes the process on a damaged SavedModel.
    """
    return _message("fingerprint_pb2", "FingerprintDef").FromString(content)


def parse_object_graph(content: bytes) -> Any:
    """Parse the object graph of a `tf.train.Checkpoint`. Reason: no public API names the objects in one."""
    return _message("trackable_object_graph_pb2", "TrackableObjectGraph").FromString(content)


def exported_by_keras(path: str) -> Any | None:
    """Return what a public name of Keras stands for in a model's configuration, or None.

    Reason: Keras keeps names of older versions for configurations only.
    """
    return _private(_module("keras.src.api_export"), "get_symbol_from_name", _READS_CONFIGURATIONS)(path)


def is_saveable(kind: type) -> bool:
    """Return whether a class is one of layers, operations, losses, metrics or optimizers, public or not.

    Reason: configurations name classes of Keras that are not public, such as the operations behind `keras.ops`.
    """
    base = _private(_module("keras.src.saving.keras_saveable"), "KerasSaveable", _READS_CONFIGURATIONS)
    return issubclass(kind, base)


def named_by_older_configurations() -> dict[str, Any]:
    """Return what configurations without modules may name, as ``.h5`` files have them.

    Reason: Keras looks these up among everything that one of its private modules holds.
    """
    return {**vars(_module("keras.src.layers")), **vars(_module("keras.src.models"))}


def model_of_config(config: Mapping[str, Any], *, safe_mode: bool) -> Any:
    """Return the model that ``config.json`` of a ``.keras`` file describes, neither compiled nor with its weights.

    Reason: `keras.saving.load_model` reads the whole file into memory, and `keras.saving.deserialize_keras_object` does
    not build what is shared once.
    """
    build = _private(_module("keras.src.saving.saving_lib"), "_model_from_config", _READS_WEIGHTS)
    return build(json.dumps(config), custom_objects=None, compile=False, safe_mode=safe_mode)


def h5_store() -> Any:
    """Return the class with which Keras reads weights from HDF5, to derive from.

    Reason: `keras.Model.load_weights` accepts only whole files, and reads a layer while it holds the GIL. Public
    fallback: write the part to a file, and load that.
    """
    return _private(_module("keras.src.saving.saving_lib"), "H5IOStore", _READS_WEIGHTS)


def h5_dataset(group: Any, key: str) -> Any:
    """Return a dataset of an HDF5 group, checked as Keras checks it. Reason: as for `h5_store`."""
    return _private(_module("keras.src.saving.saving_lib"), "safe_get_h5_dataset", _READS_WEIGHTS)(group, key)


def load_state(model: Any, store: Any) -> dict[int, Any]:
    """Assign the weights in a store to the variables of a model. Reason: as for `h5_store`.

    Returns:
        The object and the error of each part that failed, by number.
    """
    failed: set[int] = set()
    reasons: dict[int, Any] = {}
    _private(_module("keras.src.saving.saving_lib"), "_load_state", _READS_WEIGHTS)(
        model,
        weights_store=store,
        assets_store=None,
        inner_path="",
        visited_saveables=set(),
        failed_saveables=failed,
        error_msgs=reasons,
    )
    return reasons if failed else {}


def _eager_context() -> Any:
    return _private(_module("tensorflow.python.eager.context"), "context", "to set up TensorFlow's runtime")()


def _message(module: str, name: str) -> Any:
    return _private(_module(f"tensorflow.core.protobuf.{module}"), name, _READS_MESSAGES)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _gone(name, "for several purposes") from error


def _private(owner: Any, name: str, purpose: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _gone(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", purpose) from error


def _gone(name: str, purpose: str) -> PrivateNameError:
    installed = ", ".join(f"{library} {_version(library)}" for library in TRIED)
    tried = " and ".join(f"{library} {' or '.join(versions)}" for library, versions in TRIED.items())
    return PrivateNameError(f"{name} is not in {installed}; it is needed {purpose}: install {tried}, which have it")


def _version(library: str) -> str:
    return str(importlib.import_module(library).__version__)
