"""What each example of a batch adds to the state of the loss and the metrics.

The state of most metrics is a sum over examples: an update with a batch adds what updates with each of its examples
alone would add. The score of any part of the examples then follows from the sum over them, without another pass over
the data, and the score of a resample from the sum weighted by how often each example was drawn. Whether a state is such
a sum is not assumed, but checked on every batch: the increments must add up to what the update added. Where one example
alone added something, that shows nothing, and `understudy.evaluator.evaluation.part_scores` draws it twice. Losses that
are divided by a batch's weights or by the length of its mask are no such sum; see
`understudy.evaluator.model.batch_means`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from understudy.compat import convert_for_examples, mask_of, put_mask
from understudy.compat.error_texts import first_line
from understudy.evaluator.model.batch_means import ROUNDING, STATE_ROUNDING
from understudy.evaluator.model.forward import StructuredCall
from understudy.evaluator.model.undefined_values import Undefined
from understudy.evaluator.types import Array

MAX_STATE = 2**16
"""The largest state of all metrics together, in numbers; each example has increments of this size."""

_MAX_ELEMENTS = 2**22
"""The number of increments computed at once."""


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

    def undefined_at(self, values: Sequence[Array]) -> dict[str, Undefined]:
        """Return the metrics that are undefined at any of some states, from the values of each variable."""

    def undefined_losses(self, without: Mapping[str, Array]) -> dict[str, Undefined]:
        """Return the losses that are undefined, from the states at which no element of an output counts."""

    @property
    def output_names(self) -> Sequence[str]:
        """The names of the outputs, in the order in which TensorFlow flattens them."""

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
        devices: The devices of the replicas; it computes on the first.

    Attributes:
        initial: The state before the first batch, float64 ``[state]``.
        means: The variables that are means of numbers: the index of the variable of each total, which that of its count
            follows, with the place of the total in the state.
        needs: For each metric, the indices of the variables that it is computed from.

    Raises:
        NoIncrementsError: The update or the result of a metric cannot be computed for many examples at once, or the
            state is too large.
    """

    def __init__(
        self, program: Scoring, initial: Sequence[Any], arguments: Sequence[Any], devices: Sequence[str]
    ) -> None:
        convert_for_examples()
        self._program = program
        self._initial = initial
        self._specs = [tf.TensorSpec(value.shape, value.dtype) for value in initial]
        self._sizes = [int(np.prod(spec.shape)) for spec in self._specs]
        self._device = devices[0]
        self._arguments = arguments
        self._divided: tuple[int, ...] = ()
        self.initial = self.flat([initial])[0]
        self.means = dict(self._find_means())
        if len(self.initial) > MAX_STATE:
            raise NoIncrementsError(f"their state has {len(self.initial)} numbers, more than {MAX_STATE}")
        try:
            flat = [leaf for leaf in tf.nest.flatten(arguments) if leaf is not None]
            self._add = StructuredCall(self._increments, [[_any_length(leaf) for leaf in flat]], devices)
            self._used = frozenset(_used_arguments(self._add.function, len(flat)))
            vectors = tf.TensorSpec([None, len(self.initial)], tf.float64)
            self._finish = StructuredCall(self._results, [vectors], devices)
            results = tf.function(program.results, autograph=False).get_concrete_function(self._specs)
            self.needs = _needs(results, len(self._specs))
        except Exception as error:  # a metric of the user may raise anything while it is traced
            raise NoIncrementsError(
                f"a metric cannot be computed for each example ({type(error).__name__}: {first_line(error)})"
            ) from error

    def leaves(self, arguments: Sequence[Any]) -> list[Any]:
        """Return what the increments of a batch are computed from, of which a row where only the form matters.

        Args:
            arguments: The batch, as for the program.
        """
        given = (leaf for leaf in tf.nest.flatten(arguments) if leaf is not None)
        return [_as_leaf(leaf) if place in self._used else _row(leaf) for place, leaf in enumerate(given)]

    def __call__(self, batches: Sequence[Sequence[Any]]) -> tuple[Array, Array]:
        """Return what each example of some batches adds to the state, and what losses may be divided by.

        Args:
            batches: The `leaves` of each batch, of one form.

        Returns:
            Float64 ``[examples, state]``, and float64 ``[examples, divisors]``: 1, then for each output with a mask or
            weights the number of its elements that the mask keeps, the sum of their weights, or both.
        """
        leaves = [
            parts[0] if len(parts) == 1 or place not in self._used else _joined(parts)
            for place, parts in enumerate(zip(*batches, strict=True))
        ]
        step = max(1, _MAX_ELEMENTS // max(1, len(self.initial)))
        examples = max(int(leaf.shape[0]) for leaf in leaves)
        pieces = []
        for start in range(0, examples, step):
            whole = examples <= step
            piece = [
                leaf if whole or place not in self._used else leaf[start : start + step]
                for place, leaf in enumerate(leaves)
            ]
            pieces.append(np.asarray(self._add(piece)))
        found = np.concatenate(pieces)
        return found[:, : len(self.initial)], found[:, len(self.initial) :]

    def results(self, states: Array) -> dict[str, Array]:
        """Return the metrics of some states, float64 ``[states]``, by name; ``name/0``, ... if one has several values.

        Args:
            states: The states, ``[states, state]``.
        """
        step = max(1, _MAX_ELEMENTS // max(1, len(self.initial)))
        parts = [self._finish(states[start : start + step]) for start in range(0, len(states), step)]
        found: dict[str, Array] = {}
        for name in parts[0]:
            values = np.concatenate([np.asarray(part[name], np.float64) for part in parts])
            if values.ndim == 1:
                found[name] = values
            else:
                columns = values.reshape(len(values), -1).T
                found.update({f"{name}/{index}": column for index, column in enumerate(columns)})
        return found

    def undefined(self, states: Array) -> dict[str, Undefined]:
        """Return the metrics that are undefined at any of some states, by their names in `results`.

        Args:
            states: The states, ``[states, state]``.
        """
        parts = zip(self.parts(), self._specs, strict=True)
        return self._program.undefined_at([states[:, part].reshape(len(states), *spec.shape) for part, spec in parts])

    def undefined_losses(self, weights: Array) -> dict[str, Undefined]:
        """Return the losses that are undefined at any of some states, by their names in `results`.

        Args:
            weights: The sums of all divisors but the first over the examples of each state, ``[states, divisors - 1]``;
                ``[states, 0]`` if there are none.
        """
        found: dict[str, Array] = {}
        for output, sums in zip(self._divided, weights.T, strict=True):
            name = self._program.output_names[output]
            found[name] = found.get(name, False) | (sums == 0)
        return self._program.undefined_losses(found)

    def flat(self, states: Sequence[Sequence[Any]]) -> Array:
        """Return some states from the values of the variables at each, float64 ``[states, state]``."""
        of_variables = (
            np.array([np.asarray(value) for value in values], np.float64) for values in zip(*states, strict=True)
        )
        columns = (values.reshape(len(states), -1) for values in of_variables)
        return np.concatenate([np.zeros((len(states), 0)), *columns], axis=1)

    def sums(self, increments: Array, starts: Array, states: Array) -> tuple[bool, ...]:
        """Return for each variable whether the increments of every batch add up to what its update added.

        Args:
            increments: The increments of some batches, ``[examples, state]``.
            starts: The index of the first example of each batch, int64 ``[batches]``.
            states: The state before the first batch and after each, ``[1 + batches, state]``.
        """
        with np.errstate(invalid="ignore"):  # infinite values
            added, size = np.add.reduceat(increments, starts), np.add.reduceat(np.abs(increments), starts)
            apart = np.abs(np.diff(states, axis=0) - added)
        reached = np.maximum(np.abs(states[:-1]), np.abs(states[1:]))
        held = []
        for part in self.parts():
            state = reached[:, part].max(axis=1, initial=0.0)
            allowed = ROUNDING * size[:, part].max(axis=1, initial=0.0) + STATE_ROUNDING * state
            held.append(not (apart[:, part] > allowed[:, np.newaxis]).any())
        return tuple(held)

    def _find_means(self) -> Iterator[tuple[int, int]]:
        names = [variable.name.rpartition("/")[2] for variable in self._program.variables]
        places = [part.start for part in self.parts()]
        for index, pair in enumerate(itertools.pairwise(names)):
            if pair == ("total", "count") and self._sizes[index] == self._sizes[index + 1] == 1:
                yield index, places[index]

    def parts(self) -> Iterator[slice]:
        """Yield the place of each variable in the state."""
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
            divisors = list(_divisors(predictions, weights))
            self._divided = tuple(output for output, _ in divisors)
            added = tf.vectorized_map(of_one, present)
            ones = tf.ones([tf.shape(added)[0]], tf.float64)
            return tf.concat([added, tf.stack([ones, *(each for _, each in divisors)], axis=1)], axis=1)

    def _packed(self, flat: Sequence[Any]) -> Any:
        values = iter(flat)
        leaves = [None if leaf is None else next(values) for leaf in tf.nest.flatten(self._arguments)]
        return tf.nest.pack_sequence_as(self._arguments, leaves)

    def _results(self, states: Any) -> dict[str, Any]:
        def of_one(state: Any) -> dict[str, Any]:
            values = [
                tf.cast(tf.reshape(state[part], spec.shape), spec.dtype)
                for part, spec in zip(self.parts(), self._specs, strict=True)
            ]
            return {name: tf.cast(value, tf.float64) for name, value in self._program.results(values).items()}

        with tf.device(self._device):
            results: dict[str, Any] = tf.vectorized_map(of_one, states)
        return results


def _as_leaf(leaf: Any) -> Any:
    """Return an array of numbers, or a tensor of others: joined arrays are converted faster than one by one."""
    return np.asarray(leaf) if _is_numeric(leaf.dtype) else tf.convert_to_tensor(leaf)


@lru_cache(maxsize=64)  # TensorFlow and NumPy take a while to convert a dtype
def _is_numeric(dtype: Any) -> bool:
    return np.dtype(tf.as_dtype(dtype).as_numpy_dtype).kind in "biuf"


def _row(leaf: Any) -> Any:
    return leaf if leaf.shape[0] == 1 else leaf[:1]


def _joined(parts: Sequence[Any]) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else tf.concat(parts, axis=0)


def _divisors(predictions: Any, weights: Any) -> Iterator[tuple[int, Any]]:
    """Yield what losses of the outputs may be divided by, float64 ``[examples]``, each with the place of its output."""
    outputs = tf.nest.flatten(predictions)
    of_outputs = tf.nest.flatten(weights)
    if len(of_outputs) != len(outputs):
        of_outputs = of_outputs * len(outputs) if len(of_outputs) == 1 else [None] * len(outputs)
    for place, (output, weight) in enumerate(zip(outputs, of_outputs, strict=True)):
        given = [tf.cast(each, tf.float64) for each in (mask_of(output), weight) if each is not None]
        if len(given) > 1:
            given.append(_times(*given))
        for each in given:
            yield place, tf.reduce_sum(tf.reshape(each, [tf.shape(each)[0], -1]), axis=1)


def _times(mask: Any, weights: Any) -> Any:
    """Return weights ``[examples, ...]`` where a mask with as many axes or more keeps them."""
    more = (1,) * (mask.shape.rank - weights.shape.rank)
    return mask * tf.reshape(weights, tf.concat([tf.shape(weights), more], axis=0)) if more else mask * weights


def _any_length(leaf: Any) -> Any:
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _used_arguments(function: Any, arguments: int) -> Iterator[int]:
    """Yield the indices of a concrete function's arguments whose values matter, not only their shapes."""
    places = {tensor.op.name: index for index, tensor in enumerate(function.inputs[:arguments])}
    yield from _arguments_of(function.outputs[0].op, places, but="Shape")


def _needs(function: Any, variables: int) -> dict[str, frozenset[int]]:
    """Return the arguments that each result of a concrete function depends on."""
    places = {tensor.op.name: index for index, tensor in enumerate(function.inputs[:variables])}
    return {
        name: frozenset(_arguments_of(tensor.op, places))
        for name, tensor in zip(sorted(function.structured_outputs), function.outputs, strict=True)
    }


def _arguments_of(operation: Any, places: Mapping[str, int], *, but: str = "") -> Iterator[int]:
    """Yield the arguments that an operation depends on, except through operations of one type."""
    waiting, seen = deque([operation]), {operation.name}
    while waiting:
        current = waiting.popleft()
        if current.type == but:
            continue
        if current.name in places:
            yield places[current.name]
        for other in (*(tensor.op for tensor in current.inputs), *current.control_inputs):
            if other.name not in seen:
                seen.add(other.name)
                waiting.append(other)
