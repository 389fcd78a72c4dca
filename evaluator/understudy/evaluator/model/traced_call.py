"""Calls of models and of traced functions: traced on flat tensors, and run at the cost of one operation."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.checkpoints.signature import TensorSpec
from understudy.compat import call_flat, clear_kernels, layers_of, mask_of
from understudy.evaluator.evaluator_errors import LoadError

Tensors = dict[str, Any]
_MAX_NODES = 1000
_MAX_BYTES = 8 * 2**20
_MAX_DROPPED = 16
_MAX_DROPPED_BYTES = 32 * 2**20
_ANYWHERE = contextlib.nullcontext()

_dropped: deque[int] = deque()
"""The size of each deleted function that was called as one operation and whose kernels still exist, in bytes."""


class ModelCall:
    """Calls a model for inference, with a flat list of inputs, and returns a flat list of outputs and masks.

    Args:
        model: The model.
        interface: The structures of its inputs and outputs.

    Attributes:
        adds_losses: Whether the model added losses when it was called, besides the regularizers of its weights.
    """

    def __init__(self, model: Any, interface: ModelInterface) -> None:
        self.adds_losses = False
        self._model = model
        self._interface = interface
        self._outputs: tuple[str, ...] = ()
        self._masks: tuple[str, ...] = ()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs, then the masks of those that have one, ``[examples, ...]`` each."""
        leaves = dict(zip(self._interface.inputs.names, inputs, strict=True))
        results = self._interface.outputs.flatten(self._model(self._interface.inputs.unflatten(leaves), training=False))
        _check_dense(results)
        regularized = sum(variable.regularizer is not None for variable in self._model.trainable_variables)
        self.adds_losses |= len(self._model.losses) > regularized
        masks = {name: mask for name, tensor in results.items() if (mask := mask_of(tensor)) is not None}
        self._outputs, self._masks = tuple(results), tuple(masks)
        return [*(tf.identity(tensor) for tensor in results.values()), *masks.values()]

    @property
    def variables(self) -> Sequence[Any]:
        """The model's variables."""
        return self._model.variables  # type: ignore[no-any-return]

    def by_name(self, leaves: Sequence[Any]) -> tuple[Tensors, Tensors]:
        """Return the outputs and the masks by name."""
        outputs = len(self._outputs)
        return (
            dict(zip(self._outputs, leaves[:outputs], strict=True)),
            dict(zip(self._masks, leaves[outputs:], strict=True)),
        )

    def specs(self, leaves: Sequence[Any]) -> tuple[Tensors, Tensors]:
        """Return the `tf.TensorSpec`s of outputs and masks, for any number of examples."""
        outputs, masks = self.by_name([tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves])
        return outputs, masks


def _check_dense(outputs: Mapping[str, Any]) -> None:
    for name, tensor in outputs.items():
        form = {tf.RaggedTensor: "ragged", tf.SparseTensor: "sparse"}.get(type(tensor))
        if form is not None:
            raise LoadError(
                f"output {name!r} of the model is {form}: {tensor.dtype.name}{tensor.shape.as_list()}; a dense tensor "
                "was expected: end the model with a layer that returns one, such as to_tensor() of a ragged tensor"
            )


def tensor_spec(spec: TensorSpec) -> Any:
    """Return TensorFlow's form of a specification."""
    return tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype), name=None)


def tensor_specs(interface: ModelInterface) -> list[Any]:
    """Return TensorFlow's specifications of a model's inputs."""
    return [tensor_spec(spec) for spec in interface.inputs.specs]


class FrozenState:
    """The weights of layers that convert them when they are loaded.

    For example, `keras.layers.Normalization` computes plain tensors from its variables. A function that was traced
    before holds the earlier tensors.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [layer for layer in layers_of(model) if _converts_weights(layer)]
        self._digest = self._compute_digest()

    def changed(self) -> bool:
        """Whether the weights have changed since this object was created."""
        return self._digest != self._compute_digest()

    def _compute_digest(self) -> bytes:
        digest = hashlib.sha256()
        for layer in self._layers:
            for variable in layer.variables:
                digest.update(variable.numpy().tobytes())
        return digest.digest()


def _converts_weights(layer: Any) -> bool:
    kind = type(layer)
    loads_itself = kind.load_own_variables is not keras.Layer.load_own_variables
    return hasattr(layer, "finalize_state") or (loads_itself and not kind.__module__.startswith("keras."))


class DirectCall:
    """A concrete function of flat tensors, called through the operation that runs functions inside graphs.

    `ConcreteFunction.__call__` binds and checks its arguments in Python, which takes longer than a small model computes
    (docs/explanation/performance.md). The caller must check the arguments instead. Thread-safe.

    This applies to functions on the first CPU device. Functions that span devices pass tensors through a rendezvous,
    which overlapping calls of the operation would share. Such a function is called by name, which gives each call its
    own rendezvous and is also cheaper than the concrete function's checks.

    If a function was called by name, TensorFlow frees its kernels with the function; those of an operation stay until
    `give_back_kernels`. Therefore a function with large constants is called by name as well, and so is one with many
    operations, for which the difference is small.

    Args:
        function: A concrete function whose every argument is one tensor and which returns a list of tensors.
        devices: The devices of its variables.
    """

    def __init__(self, function: Any, devices: Sequence[str]) -> None:
        self.function = function
        self._dtypes = [tensor.dtype for tensor in function.outputs]
        self._has_gpu = any("GPU" in device.upper() for device in devices)
        on_first_cpu = [device.upper().rpartition("DEVICE:")[2] for device in devices] == ["CPU:0"]
        self._call_flat = call_flat(function)
        nodes, size = size_of(function)
        self._is_direct = on_first_cpu and nodes <= _MAX_NODES and size <= _MAX_BYTES
        if self._is_direct:
            weakref.finalize(self, _dropped.append, size).atexit = False

    def __call__(self, *arguments: Any) -> list[Any]:
        """Return the tensors that the function returns.

        Args:
            arguments: An array or a tensor for each argument, with its dtype and a compatible shape.
        """
        captured = self.function.captured_inputs
        if not self._is_direct:
            with tf.device("CPU:0") if self._has_gpu else _ANYWHERE:  # else all tensors go to the first GPU
                tensors = [_as_tensor(argument) for argument in arguments]
            return list(self._call_flat(*tensors, *captured))
        return tf.raw_ops.StatefulPartitionedCall(  # type: ignore[no-any-return]
            args=[*arguments, *captured], Tout=self._dtypes, f=self.function
        )


def _as_tensor(argument: Any) -> Any:
    """Return an array as a tensor; unlike `tf.constant`, an operation uses an aligned array without a copy."""
    return argument if isinstance(argument, tf.Tensor) else tf.raw_ops.Identity(input=argument)


class StructuredCall:
    """A Python function, traced once for arguments of any structure, and called as `DirectCall` does. Thread-safe.

    Args:
        python_function: The function to trace; takes and returns structures of tensors.
        specs: The specification of each argument: structures of `tf.TensorSpec`s, and None for None.
        devices: The devices of its variables.
    """

    def __init__(self, python_function: Callable[..., Any], specs: Sequence[Any], devices: Sequence[str]) -> None:
        leaves = tf.nest.flatten(specs)
        self._places = [place for place, leaf in enumerate(leaves) if leaf is not None]
        self._result: Any = None

        def of_leaves(*given: Any) -> list[Any]:
            filled = list(leaves)
            for place, leaf in zip(self._places, given, strict=True):
                filled[place] = leaf
            result = python_function(*tf.nest.pack_sequence_as(specs, filled))
            self._result = tf.nest.map_structure(lambda _: None, result)
            return tf.nest.flatten(result)  # type: ignore[no-any-return]

        traced = tf.function(of_leaves, autograph=False)
        self._call = DirectCall(traced.get_concrete_function(*(leaves[place] for place in self._places)), devices)

    @property
    def function(self) -> Any:
        """The concrete function."""
        return self._call.function

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's result for arguments that match the specifications."""
        leaves = tf.nest.flatten(arguments)
        return tf.nest.pack_sequence_as(self._result, self._call(*(leaves[place] for place in self._places)))


def give_back_kernels() -> bool:
    """Free the kernels of deleted functions, once there are many or they are large. Thread-safe.

    Returns:
        Whether kernels were freed. Then the next call of every other function creates its kernels again, which takes
        30 ms or more; make these calls before the next request.
    """
    if len(_dropped) < _MAX_DROPPED and sum(tuple(_dropped)) < _MAX_DROPPED_BYTES:
        return False
    _dropped.clear()
    clear_kernels()
    return True


def size_of(function: Any) -> tuple[int, int]:
    """Return the number of operations of a function, and its size in bytes, constants included."""
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function), graph.ByteSize()


def reclaim_memory() -> bool:
    """Free the memory of dropped models. Thread-safe; takes milliseconds if `gc.freeze` was called after the start.

    A Keras model and a traced function are reference cycles, which only a garbage collection frees. Python collects the
    oldest generation too seldom for models, which are few objects with much memory.

    Returns:
        Whether functions in use create their kernels again at their next call; see `give_back_kernels`.
    """
    gc.collect()
    gave_back_kernels = give_back_kernels()
    if _trim is not None:
        _trim(0)
    return gave_back_kernels


def _find_trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's `malloc_trim`, or None with another allocator."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


_trim = _find_trim()
