"""The forward pass with constants for its variables, which TensorFlow runs faster.

TensorFlow folds constants into one another (a BatchNorm into the convolution before it), and oneDNN keeps the packed
form of weights only if they are constants. Short loops of recurrent layers are unrolled for it.
docs/decisions/frozen-weights.md has the figures.
"""

from __future__ import annotations

import itertools
import logging
import math
import resource
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from understudy.checkpoints.low_priority import at_low_priority
from understudy.compat import add_function, constants_for_variables, remove_function
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import FreezingCancelledError, NoFasterError, NotFrozenError
from understudy.evaluator.model.forward import ForwardPass
from understudy.evaluator.model.graph_analysis import state_changes
from understudy.evaluator.model.reclaiming import size_of
from understudy.evaluator.model.replica_forward import ReplicaForward
from understudy.evaluator.types import Array, Arrays

_log = logging.getLogger(__name__)

_NOT_FROZEN_YET = "it is frozen once it has served for a moment"

TOLERANCE = 1e-6
"""How far an output with constants may be from the one with variables, as a share of the largest value."""

MIN_GAIN = 1.05
"""The geometric mean, over the batch sizes, of the time with variables over the time with constants, at least."""

MIN_GAIN_OF_EACH = 0.9
"""The same for each batch size."""

MEMORY_FACTOR = 7
"""The memory for constants, in multiples of their size.

The function, its definition, its optimized graph, its kernels and oneDNN each have a copy.
"""

_BYTES_PER_OPERATION = 50 * 2**10
_MEBIBYTE = 2**20
_MAX_GRAPH_BYTES = 2**30
"""A graph of more than 2 GiB cannot be serialized."""

_FREE_FILES = 32
"""How many files the process must be able to open. If its optimizer cannot open one, TensorFlow 2.21 may end it."""

_MIN_ROUNDS = 3
_MAX_ROUNDS = 50
_TIMED_SECONDS = 0.2
"""How many times each batch size is timed, and how long if these are more than the least."""

_numbers = itertools.count()


class FrozenPass:
    """The forward pass of predictions with constants for the weights, from `freeze` until `thaw`. Thread-safe.

    Attributes:
        forward: The pass: one reference, so that it changes between two batches; None while the variables are used.
    """

    def __init__(self) -> None:
        self.forward: ForwardPass | None = None
        self._why_not = _NOT_FROZEN_YET
        self._timed: _Timed | None = None

    @property
    def note(self) -> str:
        """Whether constants are used for the weights, and why not."""
        if self.forward is not None:
            return "Predict uses constants for the weights"
        return f"Predict uses variables for the weights: {self._why_not}"

    def freeze(
        self,
        variables: ForwardPass | ReplicaForward,
        *,
        samples: Callable[[], Iterable[Arrays]],
        limit_mib: int,
        check_wanted: Callable[[], None],
    ) -> int:
        """Make constants of the weights, and use them; return the memory that they take, in bytes, about.

        Args:
            variables: The pass with variables.
            samples: Returns batches on which to compare and time both.
            limit_mib: The memory that the constants may take.
            check_wanted: Called between the parts of the work; raises FreezingCancelledError.

        Raises:
            NotFrozenError: The variables stay in use, for this reason.
        """
        try:
            self.forward = frozen = self._freeze(variables, samples, limit_mib, check_wanted)
        except FreezingCancelledError:
            raise
        except Exception as error:
            self._why_not = first_line(error)
            raise
        return memory_bytes(frozen)

    def drop(self, failure: Exception) -> None:
        """Use the variables again, with which a batch was computed that failed with constants."""
        self.thaw()
        self._why_not = first_line(failure)
        _log.warning("constants for the weights are dropped", extra={"reason": self._why_not})

    def thaw(self) -> None:
        """Use the variables again. A batch that runs with constants finishes with them."""
        self.forward = None
        self._why_not = _NOT_FROZEN_YET

    def forget(self) -> None:
        """Free the memory of the pass that was timed, because another model is built."""
        self._timed = None

    def _freeze(
        self,
        variables: ForwardPass | ReplicaForward,
        samples: Callable[[], Iterable[Arrays]],
        limit_mib: int,
        check_wanted: Callable[[], None],
    ) -> ForwardPass:
        """Freeze a pass; both are timed only for the first weights that are loaded into it."""
        if isinstance(variables, ReplicaForward):
            raise NotFrozenError("on GPUs, each replica has a function of its own")
        known = self._timed if self._timed is not None and self._timed.variables is variables else None
        if known is not None and known.source is None:
            raise NoFasterError(known.no_faster)
        failure: NotFrozenError | None = None
        for source in _sources(variables) if known is None or known.source is None else (known.source,):
            try:
                frozen = freeze(
                    variables,
                    source=source,
                    samples=samples,
                    limit_mib=limit_mib,
                    is_faster=known is not None,
                    check_wanted=check_wanted,
                )
            except FreezingCancelledError:
                raise
            except NotFrozenError as error:
                failure = error
            else:
                self._timed = _Timed(variables, source)
                return frozen
        if isinstance(failure, NoFasterError):
            self._timed = _Timed(variables, None, str(failure))
        raise failure or NotFrozenError("there is nothing to freeze")


class _Timed(NamedTuple):
    """A pass that was timed, and the one that was faster with constants; None, and why, if none was."""

    variables: ForwardPass
    source: ForwardPass | None
    no_faster: str = ""


def _sources(variables: ForwardPass) -> Iterator[ForwardPass]:
    """Yield the passes to make constants of: without loops, if it has short ones, and as it is."""
    try:
        unrolled = variables.unrolled()
    except Exception as error:  # noqa: BLE001 - a user's layer may do anything, and the loop stays
        _log.info("the loops of recurrent layers stay", extra={"reason": first_line(error)})
        unrolled = None
    if unrolled is not None:
        yield unrolled
    yield variables


def freeze(
    forward: ForwardPass,
    *,
    source: ForwardPass,
    samples: Callable[[], Iterable[Arrays]],
    limit_mib: int,
    is_faster: bool,
    check_wanted: Callable[[], None],
) -> ForwardPass:
    """Return a forward pass with constants for the current values of the variables.

    Takes up to some seconds; may run while other threads use ``forward``, whose variables must not change meanwhile.

    Args:
        forward: The forward pass with variables.
        source: The pass of which constants are made: the same, or one that computes the same.
        samples: Returns batches on which to compare both.
        limit_mib: The memory that the constants may take.
        is_faster: Whether it is known that constants make this model faster; otherwise both are timed.
        check_wanted: Called between the parts of the work; raises FreezingCancelledError.

    Raises:
        NotFrozenError: The model has no variables or changes them, the constants take too much memory, the process can
            open too few files, the outputs differ by more than `TOLERANCE`, or constants make it no faster
            (NoFasterError).
    """
    (function,) = source.functions
    if forward.draws_random_numbers:
        raise NotFrozenError("the model draws random numbers, so that its outputs cannot be compared")
    _check_memory(source, limit_mib)
    _check_files()
    check_wanted()
    frozen = source.with_function(with_constants(function, source.variables))
    gains = []
    for inputs in samples():
        check_wanted()
        _check_equal(at_low_priority(lambda batch=inputs: frozen(batch)), forward(inputs))  # type: ignore[misc]
        if not is_faster:
            gains.append(_gain(frozen, forward, inputs, check_wanted))
    if not is_faster:
        _check_gains(gains)
    return frozen


def memory_bytes(forward: ForwardPass) -> int:
    """Return the memory that a forward pass takes with constants for its variables, about."""
    (function,) = forward.functions
    return MEMORY_FACTOR * _constant_bytes(forward) + _BYTES_PER_OPERATION * size_of(function)[0]


def with_constants(function: Any, variables: Sequence[Any]) -> Any:
    """Return a concrete function with constants for the current values of a concrete function's variables.

    Lookup tables stay as they are.

    Args:
        function: A concrete function whose every argument is one tensor and which returns a list of tensors.
        variables: Its variables, each on one device.

    Raises:
        NotFrozenError: It has no variables, changes variables, or TensorFlow cannot convert it.
    """
    _check_only_reads(function)
    try:
        return _converted(function, variables)
    except NotFrozenError:
        raise
    except Exception as error:
        raise NotFrozenError(f"TensorFlow cannot make constants of its variables: {first_line(error)}") from error


def _converted(function: Any, variables: Sequence[Any]) -> Any:
    graph, converted = constants_for_variables(function, variables)
    if not converted:
        raise NotFrozenError("the model has no variables")
    added = _rename_functions(graph)
    count = len(function.inputs) - len(function.captured_inputs)
    pairs = zip(function.captured_inputs, function.inputs[count:], strict=True)
    others = {inside.op.name: outside for place, (outside, inside) in enumerate(pairs) if place not in converted}
    names = [tensor.op.name for tensor in function.inputs[:count]]
    results = [tensor.name for tensor in function.outputs]

    def run(*arguments: Any) -> list[Any]:
        graph_of_call = tf.compat.v1.get_default_graph()
        inputs = dict(zip(names, arguments, strict=True))
        inputs |= {name: graph_of_call.capture(tensor) for name, tensor in others.items()}
        return list(tf.graph_util.import_graph_def(graph, input_map=inputs, return_elements=results, name=""))

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in function.inputs[:count]]
    for definition in graph.library.function:
        add_function(definition)
    try:
        frozen = tf.function(run, input_signature=specs, autograph=False).get_concrete_function()
    except BaseException:
        _remove_functions(added)
        raise
    weakref.finalize(frozen, _remove_functions, added).atexit = False
    return frozen


def _rename_functions(graph: Any) -> list[str]:
    """Give the functions of a graph names that no other has; return the names."""
    number = next(_numbers)
    functions = graph.library.function
    names = {function.signature.name: f"{function.signature.name}_constants_{number}" for function in functions}
    for node in itertools.chain(graph.node, *(function.node_def for function in functions)):
        node.op = names.get(node.op, node.op)
        for attribute in node.attr.values():
            for called in (attribute.func, *attribute.list.func):
                if called.name in names:
                    called.name = names[called.name]
        if "_lower_using_switch_merge" in node.attr:  # the conversion switched it off, which makes loops slow
            node.attr["_lower_using_switch_merge"].b = True
    for function in functions:
        function.signature.name = names[function.signature.name]
    del graph.library.gradient[:]
    return list(names.values())


def _remove_functions(names: Sequence[str]) -> None:
    for name in names:
        remove_function(name)


def _check_only_reads(function: Any) -> None:
    if changing := state_changes(function):
        raise NotFrozenError(f"the model changes its state while it predicts ({', '.join(changing)})")


def _check_memory(forward: ForwardPass, limit_mib: int) -> None:
    constants, needed = _constant_bytes(forward), memory_bytes(forward)
    if constants > _MAX_GRAPH_BYTES:
        raise NotFrozenError(f"{constants // _MEBIBYTE} MiB of constants are more than a graph can hold")
    if needed > limit_mib * _MEBIBYTE:
        raise NotFrozenError(
            f"constants would take about {math.ceil(needed / _MEBIBYTE)} MiB, and frozen_memory_mib is {limit_mib}"
        )


def _check_files() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        opened = sum(int(file.name) < limit for file in Path("/dev/fd").iterdir()) - 1  # without that of this listing
        free = limit - opened
    except OSError:  # there is none to list them with
        free = 0
    if free < _FREE_FILES:
        raise NotFrozenError(
            f"{free} more files can be opened, and making constants needs {_FREE_FILES}; raise the limit of open files "
            f"(ulimit -n), which is {limit}"
        )


def _constant_bytes(forward: ForwardPass) -> int:
    """Return the bytes of the variables on all devices, and of the tensors that the function captures."""
    (function,) = forward.functions
    captured = (tensor for tensor in function.captured_inputs if tensor.dtype not in (tf.resource, tf.variant))
    return sum(value.shape.num_elements() * value.dtype.size for value in (*forward.variables, *captured))


def _check_equal(frozen: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Check outputs and masks by name."""
    for results, wanted in zip(frozen, expected, strict=True):
        for name, tensor in results.items():
            off = _difference(np.asarray(tensor), np.asarray(wanted[name]))
            if not off <= TOLERANCE:
                raise NotFrozenError(
                    f"with constants, output {name!r} differs by {off:.1e} of its largest value; {TOLERANCE:.0e} is "
                    "the most that is accepted"
                )


def _difference(came: Array, expected: Array) -> float:
    """Return the largest difference as a share of the largest value; infinity if other values differ."""
    if came.shape != expected.shape or came.dtype != expected.dtype:
        return math.inf
    if np.array_equal(came, expected, equal_nan=came.dtype.kind in "fc"):
        return 0.0
    if came.dtype.kind in "biuSOU":
        return math.inf
    came, expected = (
        array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in (came, expected)
    )
    is_finite = np.isfinite(expected)
    if not np.array_equal(came[~is_finite], expected[~is_finite], equal_nan=True):
        return math.inf
    largest = np.max(np.abs(expected[is_finite]), initial=0.0)
    return float(np.max(np.abs(came[is_finite] - expected[is_finite]), initial=0.0) / (largest or 1.0))


def _gain(frozen: ForwardPass, forward: ForwardPass, inputs: Arrays, check_wanted: Callable[[], None]) -> float:
    """Return the time of a batch with variables over its time with constants; of several times, the shortest counts."""
    with_constants, with_variables = math.inf, math.inf
    until = time.perf_counter() + _TIMED_SECONDS
    rounds = 0
    while rounds < _MIN_ROUNDS or (rounds < _MAX_ROUNDS and time.perf_counter() < until):
        check_wanted()
        with_constants = min(with_constants, _seconds(frozen, inputs))
        with_variables = min(with_variables, _seconds(forward, inputs))
        rounds += 1
    return with_variables / with_constants


def _seconds(forward: ForwardPass, inputs: Arrays) -> float:
    began = time.perf_counter()
    forward(inputs)
    return time.perf_counter() - began


def _check_gains(gains: Sequence[float]) -> None:
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    if mean < MIN_GAIN or min(gains) < MIN_GAIN_OF_EACH:
        listed = ", ".join(f"{gain:.2f}" for gain in gains)
        raise NoFasterError(f"constants make it no faster; the warm-up's batches ran at {listed} times the speed")
