"""The forward pass: one concrete function that splits a batch over the replicas and joins the outputs.

A model is traced on flat tensors, and its function runs at the cost of one operation.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.checkpoints.signature import TensorSpec
from understudy.compat import call_flat, mask_of
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import (
    InvalidInputError,
    LoadError,
    OutOfResourcesError,
    Resource,
    exhausted_resource,
)
from understudy.evaluator.model.graph_analysis import draws_random_numbers, find_value_ranges
from understudy.evaluator.model.reclaiming import DROPPED_BYTES, reclaim_memory, size_of
from understudy.evaluator.model.unrolling import short_loops, unrolled

_log = logging.getLogger(__name__)

Tensors = dict[str, Any]

Shapes = tuple[tuple[int, ...], ...]
"""The shape of one example of each input."""

_MAX_SHAPES = 64
_MAX_NODES = 1000
_MAX_BYTES = 8 * 2**20
_ANYWHERE = contextlib.nullcontext()


class BatchLimits:
    """The maximum number of examples of a call, by the shapes of an example. Thread-safe.

    A limit that was lowered for some shapes applies to them and to shapes that are at least as large along every axis,
    so that one caller's long sequences do not split another caller's batches. At most 64 shapes are remembered; the
    oldest is forgotten first.

    Args:
        most: The maximum for shapes that fit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lowered: OrderedDict[Shapes, int] = OrderedDict()
        self._lock = threading.Lock()

    def limit(self, inputs: Sequence[Any]) -> int:
        """Return the maximum for a batch of these inputs, ``[examples, ...]`` each."""
        if not self._lowered:
            return self._most
        shapes = _shapes(inputs)
        with self._lock:
            return min((limit for known, limit in self._lowered.items() if _covers(known, shapes)), default=self._most)

    def lower(self, inputs: Sequence[Any], examples: int, limit: int, error: Exception) -> None:
        """Lower the maximum after a call did not fit in memory.

        Args:
            inputs: The inputs of the batch, ``[examples, ...]`` each.
            examples: The number of examples of the call that failed.
            limit: The maximum from now on; 0 if a single example did not fit.
            error: Its error.

        Raises:
            OutOfResourcesError: A single example does not fit.
        """
        if limit < 1:
            raise OutOfResourcesError(f"there is no memory for a single example: {first_line(error)}") from error
        shapes = _shapes(inputs)
        with self._lock:
            self._lowered.pop(shapes, None)
            self._lowered[shapes] = limit
            if len(self._lowered) > _MAX_SHAPES:
                self._lowered.popitem(last=False)
        _log.warning(
            "out of memory, going on with smaller batches of these shapes",
            extra={"shapes": shapes, "examples": examples, "max_batch_size": limit},
        )

    def restore(self) -> bool:
        """Forget all lowered limits, because memory may be available again; return whether there were any."""
        with self._lock:
            lowered = bool(self._lowered)
            self._lowered.clear()
            return lowered


def _shapes(inputs: Sequence[Any]) -> Shapes:
    return tuple(tuple(leaf.shape[1:]) for leaf in inputs)


def _covers(known: Shapes, shapes: Shapes) -> bool:
    """Whether an example of ``shapes`` is at least as large along every axis as one of ``known``."""
    return all(
        len(small) == len(large) and all(low <= high for low, high in zip(small, large, strict=True))
        for small, large in zip(known, shapes, strict=True)
    )


class ModelCall:
    """Calls a model for inference, with a flat list of inputs, and returns a flat list of outputs and masks.

    Args:
        model: The model.
        interface: The structures of its inputs and outputs.

    Attributes:
        model: The model.
        adds_losses: Whether the model added losses when it was called, besides the regularizers of its weights.
    """

    def __init__(self, model: Any, interface: ModelInterface) -> None:
        self.adds_losses = False
        self.model = model
        self._interface = interface
        self._outputs: tuple[str, ...] = ()
        self._masks: tuple[str, ...] = ()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs, then the masks of those that have one, ``[examples, ...]`` each."""
        leaves = dict(zip(self._interface.inputs.names, inputs, strict=True))
        results = self._interface.outputs.flatten(self.model(self._interface.inputs.unflatten(leaves), training=False))
        _check_dense(results)
        regularized = sum(variable.regularizer is not None for variable in self.model.trainable_variables)
        self.adds_losses |= len(self.model.losses) > regularized
        masks = {name: mask for name, tensor in results.items() if (mask := mask_of(tensor)) is not None}
        self._outputs, self._masks = tuple(results), tuple(masks)
        return [*(tf.identity(tensor) for tensor in results.values()), *masks.values()]

    @property
    def variables(self) -> Sequence[Any]:
        """The model's variables."""
        return self.model.variables  # type: ignore[no-any-return]

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


class DirectCall:
    """A concrete function of flat tensors, called through the operation that runs functions inside graphs.

    `ConcreteFunction.__call__` binds and checks its arguments in Python, which takes longer than a small model computes
    (docs/explanation/performance.md). The caller must check the arguments instead. Thread-safe.

    This applies to functions on the first CPU device. Functions that span devices pass tensors through a rendezvous,
    which overlapping calls of the operation would share. Such a function is called by name, which gives each call its
    own rendezvous and is also cheaper than the concrete function's checks.

    If a function was called by name, TensorFlow frees its kernels with the function; those of an operation stay until
    `reclaim_memory`. Therefore a function with large constants is called by name as well, and so is one with many
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
            weakref.finalize(self, DROPPED_BYTES.append, size).atexit = False

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
            self._result = keras.tree.map_structure(lambda _: None, result)
            return keras.tree.flatten(result)  # type: ignore[no-any-return]

        traced = tf.function(of_leaves, autograph=False)
        self._call = DirectCall(traced.get_concrete_function(*(leaves[place] for place in self._places)), devices)

    @property
    def function(self) -> Any:
        """The concrete function."""
        return self._call.function

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's result for arguments that match the specifications."""
        leaves = tf.nest.flatten(arguments)
        results = self._call(*(leaves[place] for place in self._places))
        return keras.tree.pack_sequence_as(self._result, results)  # an eighth of the time of tf.nest's


class ForwardPass:
    """A model's forward pass over all replicas, traced once. Thread-safe.

    The function takes batches of any size. Each replica gets a slice; the sizes of the slices differ by at most one. If
    there are fewer examples than replicas, the remaining replicas repeat a neighbour's example, and that result is
    dropped; a replica never gets an empty slice.

    Args:
        model: The model, with variables mirrored by the strategy.
        interface: The structures of its inputs and outputs.
        strategy: The `tf.distribute.MirroredStrategy` whose replicas share each batch.
        max_batch_size: The maximum number of examples of one call of the function; larger batches run in pieces.
        on_trace: Called each time the function is traced: normally once.

    Attributes:
        limits: The current maximum, lowered after an out-of-memory error.
        adds_losses: Whether the model adds losses in its call, besides the regularizers of its weights.
        draws_random_numbers: Whether the model draws random numbers at inference.
        input_ranges: The valid ids of inputs, by name, for inputs that directly index a table.
    """

    def __init__(
        self,
        model: Any,
        interface: ModelInterface,
        strategy: Any,
        *,
        max_batch_size: int,
        on_trace: Callable[[], None],
    ) -> None:
        self._names = interface.inputs.names
        self._call = ModelCall(model, interface)
        self._strategy = strategy
        self._replicas: int = strategy.num_replicas_in_sync
        self.limits = BatchLimits(max_batch_size)
        self._on_trace = on_trace
        self._specs = tensor_specs(interface)
        function = tf.function(self._trace, input_signature=self._specs, autograph=False)
        self._function = DirectCall(function.get_concrete_function(), strategy.extended.worker_devices)
        self.adds_losses = self._call.adds_losses
        self.draws_random_numbers = draws_random_numbers(self._function.function)
        ranges = find_value_ranges(self._function.function)
        self.input_ranges = {name: ranges[place] for place, name in enumerate(self._names) if place in ranges}

    def __call__(
        self, inputs: Mapping[str, Any], between_pieces: Callable[[], None] = lambda: None
    ) -> tuple[Tensors, Tensors]:
        """Run the model.

        Args:
            inputs: NumPy arrays or tensors by name, each ``[examples, ...]`` with at least one example.
            between_pieces: Called between the pieces of a batch that is too large for one call.

        Returns:
            The outputs by name, each ``[examples, ...]``, and the Keras masks of those that have one.

        Raises:
            InvalidInputError: The model refuses a value, such as a token outside its vocabulary.
            OutOfResourcesError: There is not enough memory for a single example.
        """
        leaves = [inputs[name] for name in self._names]
        while True:
            limit = self.limits.limit(leaves)
            try:
                if leaves[0].shape[0] <= limit:
                    return self._call.by_name(self._function(*leaves))
                return self._run_in_pieces(leaves, limit, between_pieces)
            except tf.errors.InvalidArgumentError as error:
                raise InvalidInputError(f"the model refused the values: {first_line(error)}") from error
            except Exception as error:
                if exhausted_resource(error) is not Resource.MEMORY:
                    raise
                examples = min(limit, leaves[0].shape[0])
                self.limits.lower(leaves, examples, examples // 2, error)
            reclaim_memory()

    def launch(self, inputs: Mapping[str, Any]) -> Callable[[], tuple[Tensors, Tensors]]:
        """Run the model and return a function that returns its outputs: CPUs compute synchronously."""
        result = self(inputs)
        return lambda: result

    def with_function(self, function: Any) -> ForwardPass:
        """Return a forward pass that calls another concrete function of the same arguments and results."""
        other = copy.copy(self)
        other._function = DirectCall(function, self._strategy.extended.worker_devices)  # noqa: SLF001 - it is a copy
        return other

    def unrolled(self) -> ForwardPass | None:
        """Return a pass that is traced again without the loops of recurrent layers; None if there are no short ones."""
        layers = short_loops(self._call.model)
        if not layers:
            return None
        other = copy.copy(self)
        other._on_trace = lambda: None  # noqa: SLF001 - it is a copy
        function = tf.function(other._trace, input_signature=self._specs, autograph=False)  # noqa: SLF001
        with unrolled(layers):
            return other.with_function(function.get_concrete_function())

    @property
    def variables(self) -> list[Any]:
        """The model's variables on every replica, each on one device."""
        mirrored = (getattr(variable, "value", variable) for variable in self._call.variables)
        return [local for variable in mirrored for local in self._strategy.experimental_local_results(variable)]

    @property
    def functions(self) -> tuple[Any, ...]:
        """The only concrete function."""
        return (self._function.function,)

    @property
    def output_specs(self) -> tuple[Tensors, Tensors]:
        """The `tf.TensorSpec`s of the results of a call."""
        return self._call.specs(self._function.function.structured_outputs)

    def _run_in_pieces(
        self, leaves: Sequence[Any], limit: int, between_pieces: Callable[[], None]
    ) -> tuple[Tensors, Tensors]:
        pieces: list[list[Any]] = []
        for start in range(0, leaves[0].shape[0], limit):
            if pieces:
                between_pieces()
            pieces.append(self._function(*(leaf[start : start + limit] for leaf in leaves)))
        return self._call.by_name([tf.concat(parts, axis=0) for parts in zip(*pieces, strict=True)])

    def _trace(self, *inputs: Any) -> list[Any]:
        self._on_trace()
        slices, lengths = _share_out(inputs, self._replicas)
        per_replica = self._strategy.experimental_distribute_values_from_function(
            lambda context: slices[context.replica_id_in_sync_group]
        )
        return [self._join(value, lengths) for value in self._strategy.run(self._call, args=(per_replica,))]

    def _join(self, per_replica: Any, lengths: Sequence[Any]) -> Any:
        parts = self._strategy.experimental_local_results(per_replica)
        if len(parts) == 1:
            return parts[0]
        return tf.concat([part[:length] for part, length in zip(parts, lengths, strict=True)], axis=0)


def _share_out(inputs: tuple[Any, ...], replicas: int) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Return the inputs of each replica, and the number of its examples that are not padding."""
    examples = tf.shape(inputs[0])[0]
    if replicas == 1:
        return [inputs], [examples]
    pairs = list(itertools.pairwise(index * examples // replicas for index in range(replicas + 1)))
    slices = [tuple(_slice(tensor, start, stop, examples) for tensor in inputs) for start, stop in pairs]
    return slices, [stop - start for start, stop in pairs]


def _slice(tensor: Any, start: Any, stop: Any, examples: Any) -> Any:
    """Return the examples from ``start`` to ``stop``, or the nearest example if the slice is empty."""
    start = tf.minimum(start, examples - 1)
    return tensor[start : tf.maximum(stop, start + 1)]
