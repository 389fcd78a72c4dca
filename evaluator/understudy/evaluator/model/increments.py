"""What each example of a batch adds to the state of the loss and the metrics.

The state of most metrics is a sum over examples: an update with a batch adds what updates with each of its examples
alone would add. The score of any part of the examples then follows from the sum over them, without another pass over
the data, and the score of a resample from the sum weighted by how often each example was drawn. Whether a state is such
a sum is not assumed, but checked on every batch: the increments must add up to what the update added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from understudy.compat import convert_bitcasts, mask_of, put_mask
from understudy.evaluator.evaluator_errors import first_line
from understudy.evaluator.types import Array

MAX_STATE = 2**16
"""The largest state of all metrics together, in numbers; each example has increments of this size."""

_MAX_ELEMENTS = 2**22
"""The number of increments computed at once."""

_ROUNDING = 1e-5
"""The allowed difference of a sum of increments, relative to the sum of the variable's largest increments."""


class NoIncrementsError(ValueError):
    """There are no increments. The text gives the reason, to follow "because"."""


class Scoring(Protocol):
    """The parts of a scoring program that increments are computed with."""

    def predictions(self, inputs: Any, outputs: Mapping[str, Any], masks: Mapping[str, Any]) -> Any:
        """Return the outputs of the model in its structure."""

    def score(self, inputs: Any, targets: Any, weights: Any, predictions: Any) -> Any:
        """Update the loss and the metrics with a batch, in the current scope."""

    def scope(self, state: Sequence[Any]) -> Any:
        """Return a context in which the metrics' variables have these values."""

    def results(self, state: Sequence[Any]) -> dict[str, Any]:
        """Return the loss and the metrics at a state, by name."""

    @property
    def variables(self) -> Sequence[Any]:
        """The variables of the loss and the metrics."""


class StateIncrements:
    """The traced functions that compute increments, and metrics of states. Thread-safe once built.

    A state is a vector of the values of all variables, float64 ``[state]``. Building one needs exclusive use of the
    model, like building a scoring program.

    Args:
        program: The program that scores whole batches.
        initial: The values of its variables before the first batch.
        arguments: The specification of the batches, as for the program.
        device: The device to compute on.

    Attributes:
        initial: The state before the first batch, float64 ``[state]``.
        needs: For each metric, the indices of the variables that it is computed from.

    Raises:
        NoIncrementsError: The update or the result of a metric cannot be computed for many examples at once, or the
            state is too large.
    """

    def __init__(self, program: Scoring, initial: Sequence[Any], arguments: Sequence[Any], device: str) -> None:
        convert_bitcasts()
        self._program = program
        self._initial = initial
        self._specs = [tf.TensorSpec(value.shape, value.dtype) for value in initial]
        self._sizes = [int(np.prod(spec.shape)) for spec in self._specs]
        self._device = device
        self._arguments = arguments
        self.initial = self.flat(initial)
        if len(self.initial) > MAX_STATE:
            raise NoIncrementsError(f"their state has {len(self.initial)} numbers, more than {MAX_STATE}")
        try:
            flat = [leaf for leaf in tf.nest.flatten(arguments) if leaf is not None]
            self._add = _function(self._increments).get_concrete_function([_any_length(leaf) for leaf in flat])
            vectors = tf.TensorSpec([None, len(self.initial)], tf.float64)
            self._finish = _function(self._results).get_concrete_function(vectors)
            self.needs = _needs(_function(program.results).get_concrete_function(self._specs), len(self._specs))
        except Exception as error:  # a metric of the user may raise anything while it is traced
            raise NoIncrementsError(
                f"a metric cannot be computed for each example ({type(error).__name__}: {first_line(error)})"
            ) from error

    def __call__(self, arguments: Sequence[Any]) -> Array:
        """Return what each example of a batch adds to the state, float64 ``[examples, state]``."""
        leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(arguments) if leaf is not None]
        step = max(1, _MAX_ELEMENTS // max(1, len(self.initial)))
        examples = int(leaves[0].shape[0])
        if examples <= step:
            return np.asarray(self._add(leaves))
        return np.concatenate(
            [
                np.asarray(self._add([leaf[start : start + step] for leaf in leaves]))
                for start in range(0, examples, step)
            ]
        )

    def results(self, states: Array) -> dict[str, Array]:
        """Return the metrics of some states, float64 ``[states]``, by name; ``name/0``, ... if one has several values.

        Args:
            states: The states, ``[states, state]``.
        """
        step = max(1, _MAX_ELEMENTS // max(1, len(self.initial)))
        parts = [self._finish(tf.constant(states[start : start + step])) for start in range(0, len(states), step)]
        found: dict[str, Array] = {}
        for name in parts[0]:
            values = np.concatenate([np.asarray(part[name], np.float64) for part in parts])
            if values.ndim == 1:
                found[name] = values
            else:
                columns = values.reshape(len(values), -1).T
                found.update({f"{name}/{index}": column for index, column in enumerate(columns)})
        return found

    def flat(self, values: Sequence[Any]) -> Array:
        """Return the values of the variables as a state."""
        return np.concatenate([np.zeros(0), *(np.asarray(value, np.float64).ravel() for value in values)])

    def sums(self, increments: Array, before: Array, after: Array) -> tuple[bool, ...]:
        """Return for each variable whether the increments of a batch add up to what the update added.

        Args:
            increments: The increments, ``[examples, state]``.
            before: The state before the update, ``[state]``.
            after: The state after it.
        """
        added, size = increments.sum(axis=0), np.abs(increments).sum(axis=0)
        held = []
        for part in self._parts():
            state = np.maximum(np.abs(before[part]), np.abs(after[part])).max(initial=0.0)
            allowed = _ROUNDING * size[part].max(initial=0.0) + 4 * float(np.finfo(np.float32).eps) * state
            held.append(bool(np.all(~(np.abs(after[part] - before[part] - added[part]) > allowed))))
        return tuple(held)

    def _parts(self) -> Iterator[slice]:
        start = 0
        for size in self._sizes:
            yield slice(start, start + size)
            start += size

    def _increments(self, flat: Sequence[Any]) -> Any:
        inputs, targets, weights, outputs, masks = self._packed(flat)
        with tf.device(self._device), self._program.scope(self._initial):
            predictions = self._program.predictions(inputs, outputs, masks)
        leaves = tf.nest.flatten((inputs, targets, weights, predictions))
        own_masks = [mask_of(leaf) for leaf in leaves]
        present = [leaf for leaf in (*leaves, *own_masks) if leaf is not None]

        def of_one(example: Sequence[Any]) -> Any:
            values = iter(example)
            filled = [None if leaf is None else next(values)[tf.newaxis] for leaf in (*leaves, *own_masks)]
            parts, parts_masks = filled[: len(leaves)], filled[len(leaves) :]
            for part, mask in zip(parts, parts_masks, strict=True):
                if mask is not None:
                    put_mask(part, mask)
            own_inputs, own_targets, own_weights, own_predictions = tf.nest.pack_sequence_as(
                (inputs, targets, weights, predictions), parts
            )
            with self._program.scope(self._initial) as scope:
                self._program.score(own_inputs, own_targets, own_weights, own_predictions)
            added = [
                tf.cast(scope.get_current_value(variable), tf.float64) - tf.cast(start, tf.float64)
                for variable, start in zip(self._program.variables, self._initial, strict=True)
            ]
            return tf.concat([tf.reshape(value, [-1]) for value in added], axis=0)

        with tf.device(self._device):
            return tf.vectorized_map(of_one, present)

    def _packed(self, flat: Sequence[Any]) -> Any:
        values = iter(flat)
        leaves = [None if leaf is None else next(values) for leaf in tf.nest.flatten(self._arguments)]
        return tf.nest.pack_sequence_as(self._arguments, leaves)

    def _results(self, states: Any) -> dict[str, Any]:
        def of_one(state: Any) -> dict[str, Any]:
            values = [
                tf.cast(tf.reshape(state[part], spec.shape), spec.dtype)
                for part, spec in zip(self._parts(), self._specs, strict=True)
            ]
            return {name: tf.cast(value, tf.float64) for name, value in self._program.results(values).items()}

        with tf.device(self._device):
            results: dict[str, Any] = tf.vectorized_map(of_one, states)
        return results


def _function(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False)


def _any_length(leaf: Any) -> Any:
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _needs(function: Any, variables: int) -> dict[str, frozenset[int]]:
    """Return the arguments that each result of a concrete function depends on."""
    places = {tensor.op.name: index for index, tensor in enumerate(function.inputs[:variables])}
    return {
        name: frozenset(_arguments_of(tensor.op, places))
        for name, tensor in zip(sorted(function.structured_outputs), function.outputs, strict=True)
    }


def _arguments_of(operation: Any, places: Mapping[str, int]) -> Iterator[int]:
    waiting, seen = deque([operation]), {operation.name}
    while waiting:
        current = waiting.popleft()
        if current.name in places:
            yield places[current.name]
        for other in (*(tensor.op for tensor in current.inputs), *current.control_inputs):
            if other.name not in seen:
                seen.add(other.name)
                waiting.append(other)
