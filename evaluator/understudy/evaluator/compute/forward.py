"""The forward pass: one concrete function that splits a batch over the replicas and joins the outputs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.compute.direct_call import DirectCall
from understudy.evaluator.compute.masks import mask_of
from understudy.evaluator.compute.text import first_line
from understudy.evaluator.compute.value_ranges import find_value_ranges
from understudy.evaluator.errors import InvalidInputError

Tensors = dict[str, Any]

_RANDOM_OPERATION = re.compile(
    r"(Stateless|Stateful)?(Parameterized)?(Random|TruncatedNormal|StandardNormal|Uniform|Multinomial)"
)


class ForwardPass:
    """A model's forward pass over all replicas, traced once. Thread-safe.

    The function takes batches of any length: each replica gets a slice, of lengths that differ by one at most. Where
    there are fewer rows than replicas, the replicas without a row of their own repeat a neighbour's, and that result
    is dropped; a replica never sees an empty slice.

    Args:
        model: The model, with variables mirrored by the strategy.
        interface: Its structures.
        strategy: The `tf.distribute.MirroredStrategy` whose replicas share each batch.
        max_rows: The most rows of one call of the function; larger batches run in pieces.
        on_trace: Called each time the function is traced: once, unless something is wrong.

    Attributes:
        adds_losses: Whether the model adds losses in its call, beside the regularizers of its weights.
        draws_random_numbers: Whether the model draws random numbers at inference.
        input_ranges: The ids that inputs may hold, by name, where the model looks them up as they come.
    """

    def __init__(
        self,
        model: Any,
        interface: ModelInterface,
        strategy: Any,
        *,
        max_rows: int,
        on_trace: Callable[[], None],
    ) -> None:
        self.adds_losses = False
        self._outputs: tuple[str, ...] = ()
        self._masks: tuple[str, ...] = ()
        self._model = model
        self._interface = interface
        self._strategy = strategy
        self._replicas: int = strategy.num_replicas_in_sync
        self._max_rows = max_rows
        self._on_trace = on_trace
        signature = [tensor_spec(spec) for spec in interface.inputs.specs]
        function = tf.function(self._trace, input_signature=signature, autograph=False)
        self._function = DirectCall(function.get_concrete_function(), strategy.extended.worker_devices)
        self.draws_random_numbers = _draws_random_numbers(self._function.function)
        ranges = find_value_ranges(self._function.function)
        self.input_ranges = {
            name: ranges[place] for place, name in enumerate(interface.inputs.names) if place in ranges
        }

    def __call__(
        self, inputs: Mapping[str, Any], between_pieces: Callable[[], None] = lambda: None
    ) -> tuple[Tensors, Tensors]:
        """Run the model.

        Args:
            inputs: NumPy arrays or tensors by name, each ``[rows, ...]`` with at least one row.
            between_pieces: Called between the pieces of a batch that is too large for one call.

        Returns:
            The outputs by name, each ``[rows, ...]``, and the Keras masks of those that have one.

        Raises:
            InvalidInputError: The model refuses a value, such as a token outside its vocabulary.
        """
        leaves = [inputs[name] for name in self._interface.inputs.names]
        try:
            if leaves[0].shape[0] <= self._max_rows:
                return self._by_name(self._function(*leaves))
            return self._run_in_pieces(leaves, between_pieces)
        except tf.errors.InvalidArgumentError as error:
            raise InvalidInputError(f"the model refused the values: {first_line(error)}") from error

    @property
    def output_specs(self) -> tuple[Tensors, Tensors]:
        """The `tf.TensorSpec`s of what a call returns."""
        outputs, masks = self._by_name(self._function.function.structured_outputs)
        return _open_batch(outputs), _open_batch(masks)

    def _run_in_pieces(self, leaves: Sequence[Any], between_pieces: Callable[[], None]) -> tuple[Tensors, Tensors]:
        pieces: list[list[Any]] = []
        for start in range(0, leaves[0].shape[0], self._max_rows):
            if pieces:
                between_pieces()
            pieces.append(self._function(*(leaf[start : start + self._max_rows] for leaf in leaves)))
        return self._by_name([tf.concat(parts, axis=0) for parts in zip(*pieces, strict=True)])

    def _by_name(self, leaves: Sequence[Any]) -> tuple[Tensors, Tensors]:
        """Return the outputs and the masks."""
        outputs = len(self._outputs)
        return (
            dict(zip(self._outputs, leaves[:outputs], strict=True)),
            dict(zip(self._masks, leaves[outputs:], strict=True)),
        )

    def _trace(self, *inputs: Any) -> list[Any]:
        self._on_trace()
        slices, lengths = _share_out(inputs, self._replicas)
        outputs, masks = self._run(slices)
        self._outputs, self._masks = tuple(outputs), tuple(masks)
        return [self._join(value, lengths) for value in (*outputs.values(), *masks.values())]

    def _run(self, slices: Sequence[tuple[Any, ...]]) -> tuple[Tensors, Tensors]:
        per_replica = self._strategy.experimental_distribute_values_from_function(
            lambda context: slices[context.replica_id_in_sync_group]
        )
        outputs, masks = self._strategy.run(self._call, args=(per_replica,))
        return outputs, masks

    def _call(self, inputs: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
        leaves = dict(zip(self._interface.inputs.names, inputs, strict=True))
        results = self._interface.outputs.flatten(self._model(self._interface.inputs.unflatten(leaves), training=False))
        regularized = sum(variable.regularizer is not None for variable in self._model.trainable_variables)
        self.adds_losses |= len(self._model.losses) > regularized
        masks = {name: mask for name, tensor in results.items() if (mask := mask_of(tensor)) is not None}
        return {name: tf.identity(tensor) for name, tensor in results.items()}, masks

    def _join(self, per_replica: Any, lengths: Sequence[Any]) -> Any:
        parts = self._strategy.experimental_local_results(per_replica)
        if len(parts) == 1:
            return parts[0]
        return tf.concat([part[:length] for part, length in zip(parts, lengths, strict=True)], axis=0)


def tensor_spec(spec: TensorSpec) -> Any:
    """Return TensorFlow's form of a specification."""
    return tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype), name=None)


def _open_batch(tensors: Tensors) -> Tensors:
    return {name: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for name, tensor in tensors.items()}


def _share_out(inputs: tuple[Any, ...], replicas: int) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Return the inputs of each replica, and how many rows of its outputs are its own."""
    rows = tf.shape(inputs[0])[0]
    if replicas == 1:
        return [inputs], [rows]
    pairs = list(itertools.pairwise(index * rows // replicas for index in range(replicas + 1)))
    slices = [tuple(_slice(tensor, start, stop, rows) for tensor in inputs) for start, stop in pairs]
    return slices, [stop - start for start, stop in pairs]


def _slice(tensor: Any, start: Any, stop: Any, rows: Any) -> Any:
    """Return the rows from start to stop, or the nearest row where there are none."""
    start = tf.minimum(start, rows - 1)
    return tensor[start : tf.maximum(stop, start + 1)]


def _draws_random_numbers(function: Any) -> bool:
    """Whether a random number reaches an output. Dropout that is off may leave operations that nothing uses."""
    graph = function.graph.as_graph_def()
    bodies = {inner.signature.name: inner.node_def for inner in graph.library.function}
    used = _nodes_behind([tensor.op.name for tensor in function.outputs], graph.node)
    called = {name for node in used for name in _functions_of(node)}
    while more := {name for body in called for node in bodies[body] for name in _functions_of(node)} - called:
        called |= more
    nodes = itertools.chain(used, *(bodies[name] for name in called))
    return any(_RANDOM_OPERATION.match(node.op) for node in nodes)


def _nodes_behind(outputs: Sequence[str], nodes: Sequence[Any]) -> list[Any]:
    """Return the nodes that outputs depend on."""
    by_name = {node.name: node for node in nodes}
    found: dict[str, Any] = {}
    waiting = list(outputs)
    while waiting:
        name = waiting.pop().removeprefix("^").partition(":")[0]
        if name not in found:
            found[name] = by_name[name]
            waiting.extend(by_name[name].input)
    return list(found.values())


def _functions_of(node: Any) -> list[str]:
    """Return the names of the functions that a node calls."""
    attributes = node.attr.values()
    return [call.name for value in attributes for call in (value.func, *value.list.func) if call.name]
