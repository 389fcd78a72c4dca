"""Properties of a traced function, read from its graph: the valid ids of its arguments, random numbers, and state.

A CPU refuses an index outside a table and a label outside the classes. A GPU does not: the index gives zeros, the label
NaN. Therefore ids and labels are checked on the host, for all devices.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array

_SAME_VALUES = frozenset({"Cast", "Identity", "Reshape", "ExpandDims", "Squeeze", "PreventGradient", "StopGradient"})
_SPARSE_LOSS = "SparseSoftmaxCrossEntropyWithLogits"
_RANDOM_OPERATION = re.compile(
    r"(Stateless|Stateful)?(Parameterized)?(Random|TruncatedNormal|StandardNormal|Uniform|Multinomial)"
)

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})
_CALLS = re.compile(r"(Stateful)?(Stateless)?(PartitionedCall|While|If|Case)$")
_USES_VARIABLE = re.compile(r"(Assign.*|Resource.*|.*VariableOp|VarHandleOp|Rng.*|Stateful.*)$")
_RUNS_PYTHON = re.compile(r"(Eager)?PyFunc(Stateless)?$")


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The integers from ``low`` to ``high``, and also ``ignored`` if it is a number.

    ``low`` is negative if the model counts from the end of a table, as ``keras.ops.take`` does.
    """

    low: int
    high: int
    ignored: int | None = None

    def check(self, what: str, values: Array) -> None:
        """Raise InvalidInputError, naming the value and its example, if a value of ``[batch, ...]`` is outside."""
        if values.size and not (self._holds(values.min()) and self._holds(values.max())):
            self._refuse_first_outside(what, values)

    def _holds(self, value: Any) -> bool:
        return bool(self.low <= np.trunc(value) <= self.high)

    def _refuse_first_outside(self, what: str, values: Array) -> None:
        whole = np.trunc(values) if values.dtype.kind not in "iub" else values
        outside = ~((whole >= self.low) & (whole <= self.high))
        if self.ignored is not None:
            outside &= whole != self.ignored
        if outside.any():
            place = tuple(int(index) for index in np.argwhere(outside)[0])
            raise InvalidInputError(
                f"{what} has {values[place]} in example {place[0]}; a value from 0 to {self.high} was expected"
            )

    def within(self, other: ValueRange | None) -> ValueRange:
        """Return the intersection of two ranges."""
        if other is None:
            return self
        ignored = self.ignored if self.ignored == other.ignored else None
        return ValueRange(low=max(self.low, other.low), high=min(self.high, other.high), ignored=ignored)


def find_value_ranges(function: Any) -> dict[int, ValueRange]:
    """Return the range of each argument that indexes a table or is a class, by the argument's position.

    It finds arguments that reach a table (``Embedding``, ``tf.gather``) or a sparse cross-entropy in the function
    itself, with no operations in between except casts and reshapes. It does not find values that are computed from an
    argument, or lookups inside a called function, as in a SavedModel.

    Args:
        function: A concrete function whose every argument is one tensor.
    """
    places = {tensor.ref(): place for place, tensor in enumerate(function.inputs)}
    tables = _tables(function)
    ranges: dict[int, ValueRange] = {}
    for op in _operations_behind(function.outputs):
        limited = _limited(op, tables)
        if limited is None:
            continue
        indices, count = limited
        source = _source(indices)
        place = places.get(source.tensor.ref())
        if place is not None:
            low = -count if source.from_end else 0
            found = ValueRange(low=low, high=count - 1, ignored=source.ignored)
            ranges[place] = found.within(ranges.get(place))
    return ranges


def _tables(function: Any) -> dict[Any, int]:
    """Return the length of each variable that a function captures, by the reference of its handle in the graph."""
    lengths = {variable.handle.ref(): variable.shape[0] for variable in function.variables if variable.shape.rank}
    captured = function.captured_inputs
    inside = function.inputs[len(function.inputs) - len(captured) :]
    pairs = zip(captured, inside, strict=True)
    return {tensor.ref(): lengths[outside.ref()] for outside, tensor in pairs if outside.ref() in lengths}


def _limited(op: Any, tables: Mapping[Any, int]) -> tuple[Any, int] | None:
    """Return the tensor of indices or classes that an operation takes, and their number, or None if unknown."""
    count: int | None = None
    if op.type == "GatherV2":
        axis = tf.get_static_value(op.inputs[2])
        shape = op.inputs[0].shape
        count = None if axis is None or shape.rank is None else shape[int(axis)]
    elif op.type == "ResourceGather":
        count = tables.get(op.inputs[0].ref())
    elif op.type == _SPARSE_LOSS:
        count = _classes(op.inputs[0])
    return None if count is None else (op.inputs[1], count)


def _classes(logits: Any) -> int | None:
    """Return the length of the last axis, which TensorFlow loses when it flattens the others."""
    known: int | None = logits.shape[-1]
    flattened = known is None and logits.op.type == "Reshape"
    return logits.op.inputs[0].shape[-1] if flattened else known


class _Source(NamedTuple):
    """The source of indices, whether they may count from the end, and the ignored value."""

    tensor: Any
    from_end: bool = False
    ignored: int | None = None


def _source(tensor: Any) -> _Source:
    """Follow a tensor back through operations that keep its values."""
    found = _Source(tensor)
    while (earlier := _one_back(found)) is not None:
        found = earlier
    return found


def _one_back(found: _Source) -> _Source | None:
    op = found.tensor.op
    if op.type in _SAME_VALUES or _slices_batch(op):
        return found._replace(tensor=op.inputs[0])
    if op.type != "SelectV2":
        return None
    condition, chosen, other = op.inputs
    if condition.op.type == "Less" and condition.op.inputs[0] is other and _adds_to(other, chosen):
        return found._replace(tensor=other, from_end=True)
    if condition.op.type == "NotEqual" and _uncast(condition.op.inputs[0]) is _uncast(chosen):
        left_out = tf.get_static_value(condition.op.inputs[1])
        return None if left_out is None else found._replace(tensor=chosen, ignored=int(left_out))
    return None


def _uncast(tensor: Any) -> Any:
    while tensor.op.type in _SAME_VALUES:
        tensor = tensor.op.inputs[0]
    return tensor


def _adds_to(tensor: Any, total: Any) -> bool:
    return total.op.type == "AddV2" and total.op.inputs[0] is tensor


def _slices_batch(op: Any) -> bool:
    """Whether an operation slices a batch along axis 0 only."""
    return (
        op.type == "StridedSlice"
        and op.inputs[1].shape.as_list() == [1]
        and not op.get_attr("shrink_axis_mask")
        and not op.get_attr("new_axis_mask")
        and not op.get_attr("ellipsis_mask")
    )


def _operations_behind(outputs: Any) -> Iterator[Any]:
    """Yield the operations that outputs depend on, or that run because of their side effects on these."""
    waiting = [tensor.op for tensor in outputs]
    seen = set(waiting)
    while waiting:
        op = waiting.pop()
        yield op
        for earlier in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)


def draws_random_numbers(function: Any) -> bool:
    """Whether a random number reaches an output. Inactive dropout may leave unused operations."""
    graph = function.graph.as_graph_def()
    bodies = {inner.signature.name: inner.node_def for inner in graph.library.function}
    used = _nodes_behind([tensor.op.name for tensor in function.outputs], graph.node)
    called = {name for node in used for name in _functions_of(node)}
    while more := {name for body in called for node in bodies[body] for name in _functions_of(node)} - called:
        called |= more
    nodes = itertools.chain(used, *(bodies[name] for name in called))
    return any(_RANDOM_OPERATION.match(node.op) for node in nodes)


def state_changes(function: Any) -> list[str]:
    """Return the names of the operations with which a call changes variables."""
    return sorted({operation for operation in _operations(function) if _changes_state(operation)})


def may_overlap(function: Any) -> bool:
    """Whether a call changes no state and runs no Python, so that another may run at the same time."""
    return not any(_changes_state(operation) or _RUNS_PYTHON.match(operation) for operation in _operations(function))


def _operations(function: Any) -> set[str]:
    """Return the names of all operations of a function and of those that it calls."""
    graph = function.graph.as_graph_def()
    return {node.op for node in itertools.chain(graph.node, *(inner.node_def for inner in graph.library.function))}


def _changes_state(operation: str) -> bool:
    return bool(operation not in _READS and not _CALLS.fullmatch(operation) and _USES_VARIABLE.fullmatch(operation))


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
