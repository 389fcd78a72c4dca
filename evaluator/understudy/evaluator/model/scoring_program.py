"""Scores batches of one structure as `keras.Model.evaluate` does, with explicit state."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.compat import compiled_metrics, put_mask
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import InvalidInputError, NotEvaluableError
from understudy.evaluator.model.forward import StructuredCall
from understudy.evaluator.model.graph_analysis import ValueRange, find_value_ranges
from understudy.evaluator.model.increments import NoIncrementsError, StateIncrements
from understudy.evaluator.model.metric_digests import flattened, is_loss, metric_digests, named_metrics
from understudy.evaluator.model.misfits import UNFIT, Misfits, said_of_own_code
from understudy.evaluator.model.undefined_values import Undefined, UndefinedValues, undefined_losses
from understudy.evaluator.types import Array

LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class ScoringData:
    """A batch in the model's own structures, or its specification: leaves are tensors or `tf.TensorSpec`s.

    Attributes:
        inputs: The model's inputs.
        targets: The targets of its loss and metrics; None if they need none.
        sample_weights: One tensor, or the structure of the outputs, or None.
        outputs: The model's outputs, by name; empty if the program itself calls the model.
        masks: The Keras masks of the outputs, by name.
    """

    inputs: Any
    targets: Any
    sample_weights: Any
    outputs: Mapping[str, Any]
    masks: Mapping[str, Any]

    def as_arguments(self) -> tuple[Any, ...]:
        """Return the fields in order, for a traced function."""
        return self.inputs, self.targets, self.sample_weights, dict(self.outputs), dict(self.masks)

    @property
    def bytes(self) -> int:
        """The memory of the leaves."""
        return sum(
            leaf.nbytes if isinstance(leaf, np.ndarray) else math.prod(leaf.shape) * leaf.dtype.size
            for leaf in tf.nest.flatten(self.as_arguments())
            if leaf is not None
        )


@dataclass(frozen=True, kw_only=True)
class ProgramState:
    """The state after the batches scored so far. Immutable.

    Attributes:
        metrics: The values of the metrics' variables.
        outside: The values of a metric's plain variables.
        logs: The result of the model's last ``test_step``, if it is part of the score.
    """

    metrics: tuple[Any, ...]
    outside: tuple[Any, ...]
    logs: Mapping[str, Any] = field(default_factory=dict)

    def stored(self) -> dict[str, Any]:
        """Return the state with arrays in the place of tensors, for `restored`."""
        return {
            "metrics": [np.asarray(value) for value in self.metrics],
            "outside": [np.asarray(value) for value in self.outside],
            "logs": {name: np.asarray(value) for name, value in self.logs.items()},
        }

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> ProgramState:
        """Return the state that `stored` was called on."""
        return cls(
            metrics=tuple(map(tf.constant, stored["metrics"])),
            outside=tuple(map(tf.constant, stored["outside"])),
            logs={name: tf.constant(value) for name, value in stored["logs"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """Options of a scoring program.

    Attributes:
        calls_model: Call the model on the whole batch on one replica, instead of using the gathered outputs.
        custom_step: Run the model's own ``test_step``; implies that the model is called.
        with_loss: Compute the loss.
        loss_of_targets: The loss is computed from the targets alone, so there is none where no element of them counts.
        keeps_logs: The return value of a step is part of the result, because the model's class overrides it.
        loss_digest: Identifies the configuration of the losses.
        metric_digest: Identifies that of the losses and all metrics.
    """

    calls_model: bool
    custom_step: bool
    with_loss: bool
    loss_of_targets: bool
    keeps_logs: bool
    loss_digest: str
    metric_digest: str


class ScoringProgram:
    """The traced functions that score batches of one structure. Functional, hence thread-safe once built.

    The state of the metrics is an argument and a result, so that any number of streams can use one program at once.
    Building a program needs exclusive use of the model: it uses the losses and metrics that the model is compiled with
    at that time, and keeps them.

    Args:
        model: The compiled model.
        interface: The structures of its inputs and outputs.
        devices: The devices of the replicas; it computes on the first.
        options: How to score.
        data: The specification of the batches.
        on_trace: Called each time it is traced.

    Attributes:
        example_losses: Computes the losses of a batch's examples, if requested and available.
        without_example_losses: Why there are no per-example losses although they were requested.
        is_broken_down: Whether slices and resamples are computed from its batches.
        increments: Computes what each example adds to the state, if requested and available.
        without_increments: Why there are no increments although they were requested.
        runs_model: Whether it runs the model, instead of using gathered outputs.
        target_ranges: The valid classes of targets, in the order of the targets' leaves; None for any value.
    """

    def __init__(
        self,
        model: Any,
        interface: ModelInterface,
        *,
        devices: Sequence[str],
        options: ProgramOptions,
        data: ScoringData,
        on_trace: Callable[[], None],
    ) -> None:
        self.example_losses: Callable[[ScoringData], Array] | None = None
        self.without_example_losses = ""
        self.is_broken_down = False
        self.increments: StateIncrements | None = None
        self.without_increments = ""
        self._model = model
        self._interface = interface
        self._devices = devices
        self._device = devices[0]
        self._options = options
        self.runs_model = options.calls_model or options.custom_step
        self._on_trace = on_trace
        self._loss = keras.metrics.Mean(name=LOSS)
        self._compiled_metrics = compiled_metrics(model)
        self._misfits = Misfits(
            model,
            has_loss=options.with_loss,
            output_names=interface.outputs.names,
            predict=self.predictions,
        )
        self._create_variables(data)
        self._metrics = list(model.metrics)
        self._named: list[tuple[str, Any]] | None = None
        self._digests: dict[str, str] | None = None
        self._undefined: UndefinedValues | None = None
        self._has_own_result = type(model).get_metrics_result is not keras.Model.get_metrics_result
        self._variables = [*self._loss.variables, *model.metrics_variables]
        initial = tuple(self._initial_values())
        state = [tf.TensorSpec(value.shape, value.dtype) for value in initial]
        self._update = StructuredCall(self._trace_update, (state, *data.as_arguments()), devices)
        self.target_ranges = self._find_target_ranges((state, data.inputs), data.targets)
        self._result = self.results
        if self._has_own_result:  # it depends on the current compilation of the model
            self._result = self._function(self.results).get_concrete_function(state)
        self._unused_inputs = self._find_unused_inputs(state, data.inputs)
        self._outside = OutsideState(self._update.function, model)
        self.initial = ProgramState(metrics=initial, outside=self._outside.initial)

    def add_increments(self, data: ScoringData) -> None:
        """Trace the increments of examples, or note why there are none. As exclusive as building the program."""
        self.is_broken_down = True
        if self._options.custom_step or self._options.keeps_logs:
            self.without_increments = "the model computes its metrics in a way of its own"
        elif self._outside.initial:
            self.without_increments = "a metric keeps its state in variables of its own"
        else:
            try:
                self.increments = StateIncrements(self, self.initial.metrics, data.as_arguments(), self._devices)
            except NoIncrementsError as error:
                self.without_increments = str(error)

    @property
    def variables(self) -> Sequence[Any]:
        """The variables of the loss and the metrics."""
        return self._variables

    def update(self, state: ProgramState, data: ScoringData) -> ProgramState:
        """Return the state after a batch."""
        with self._outside.swapped_in(state.outside):
            metrics, logs = self._update(list(state.metrics), *data.as_arguments())
            return ProgramState(metrics=tuple(metrics), outside=self._outside.read(), logs=logs)

    def needed(self, data: ScoringData) -> ScoringData:
        """Return what slices and resamples of a batch are computed from: its inputs only if the score needs them."""
        return data if self._unused_inputs is None else replace(data, inputs=self._unused_inputs)

    def update_with(self, state: ProgramState, data: ScoringData, rows: Array) -> ProgramState:
        """Return the state after some examples of a batch.

        Args:
            state: The state before them.
            data: The batch, or what of it is `needed`.
            rows: Their indices, int64 ``[examples]``; an example may be there more than once.
        """

        def take(leaves: Any) -> Any:
            return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, rows), leaves)

        taken = ScoringData(
            inputs=take(data.inputs) if self._unused_inputs is None else self._unused_inputs,
            targets=take(data.targets),
            sample_weights=take(data.sample_weights),
            outputs=take(data.outputs),
            masks=take(data.masks),
        )
        return self.update(state, taken)

    def result(self, state: ProgramState) -> dict[str, float]:
        """Return the metrics by name. Metrics with several values appear as ``name/0``, ``name/1``, ..."""
        with self._outside.swapped_in(state.outside):
            values: Mapping[str, Any] = self._result(list(state.metrics))
        if self._options.keeps_logs and state.logs.keys() != values.keys():
            values = self._logs_with_loss(state.logs, values)
        return _as_floats(values)

    def metric_digests(self, state: ProgramState, names: Iterable[str]) -> dict[str, str]:
        """Return what identifies the configuration of each metric, by its name in the `result` at a state.

        For a metric that the model computes in a way of its own, that is the configuration of all.
        """
        if self._digests is None:
            self._digests = {} if self._has_own_result else self._own_digests(state)
        own = {name: self._digests.get(name) or self._digests.get(name.rpartition("/")[0]) for name in names}
        return {name: digest or self._options.metric_digest for name, digest in own.items()}

    def _own_digests(self, state: ProgramState) -> dict[str, str]:
        return metric_digests(self._named_metrics(state), loss=LOSS, loss_digest=self._options.loss_digest)

    def undefined(self, states: Sequence[ProgramState]) -> dict[str, Undefined]:
        """Return the metrics that are undefined at any of some states, by their names in the `result`."""
        if self._has_own_result or (self._options.keeps_logs and any(self._has_own_logs(state) for state in states)):
            return {}
        self._named_metrics(states[0])
        of_variables = zip(*(state.metrics for state in states), strict=True)
        return self.undefined_at([np.stack([np.asarray(value) for value in values]) for values in of_variables])

    def undefined_at(self, values: Sequence[Array]) -> dict[str, Undefined]:
        """Return the same from the values of each variable at the states, ``[states, ...]``."""
        if self._has_own_result:
            return {}
        if self._undefined is None:
            named = [pair for pair in self._named_metrics(self.initial) if not is_loss(pair[1], LOSS)]
            loss = self._loss if self._options.with_loss else None
            self._undefined = UndefinedValues(named, self._variables, loss)
        return self._undefined.find(values)

    def undefined_losses(self, without: Mapping[str, Array]) -> dict[str, Undefined]:
        """Return the losses that are undefined, by their names in the `result`.

        Args:
            without: By output, at which states none of its elements counts, bool ``[states]``; others always have some.
        """
        return undefined_losses(self.output_names, without) if self._options.loss_of_targets else {}

    def counting(self, data: ScoringData) -> dict[str, Array]:
        """Return by output which examples have any element that counts, bool ``[examples]``.

        Outputs without weights and masks are left out. Masks are those of gathered outputs: if the program runs the
        model, they are not known.
        """
        if data.sample_weights is None and not data.masks:
            return {}
        names = self.output_names
        weights = tf.nest.flatten(data.sample_weights)
        weights = weights if len(weights) == len(names) else weights * len(names)
        given = {name: (weight, data.masks.get(name)) for name, weight in zip(names, weights, strict=True)}
        return {name: _any_counts(*each) for name, each in given.items() if any(part is not None for part in each)}

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, in the order in which TensorFlow flattens them."""
        names = {name: name for name in self._interface.outputs.names}
        return tuple(tf.nest.flatten(alone(self._interface.outputs.unflatten(names))))

    def _named_metrics(self, state: ProgramState) -> list[tuple[str, Any]]:
        """Return the metrics by their names in a result, which are the same at every state."""
        if self._named is None:
            with self._outside.swapped_in(state.outside), tf.device(self._device), self.scope(list(state.metrics)):
                self._named = list(named_metrics(self._metrics, self._compiled_metrics))
        return self._named

    def _has_own_logs(self, state: ProgramState) -> bool:
        names = {name for name, _ in self._named_metrics(state)}
        return state.logs.keys() - {LOSS} != names - {LOSS}

    def _logs_with_loss(self, logs: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a step's logs with the program's loss: only the model's own step updates the loss tracker."""
        if self._options.custom_step:
            return logs
        loss = {LOSS: values[LOSS]} if self._options.with_loss else {}
        return {**{name: value for name, value in logs.items() if name != LOSS}, **loss}

    def _find_target_ranges(self, before: Any, targets: Any) -> list[ValueRange | None]:
        """Return the ranges of the arguments that are targets, found among the leaves of all arguments."""
        ranges = find_value_ranges(self._update.function)
        first = sum(leaf is not None for leaf in tf.nest.flatten(before))
        count = sum(leaf is not None for leaf in tf.nest.flatten(targets))
        return [ranges.get(place) for place in range(first, first + count)]

    def _find_unused_inputs(self, state: Any, inputs: Any) -> Any:
        """Return what takes the place of the inputs if no operation reads them, else None."""
        first, count = (sum(leaf is not None for leaf in tf.nest.flatten(leaves)) for leaves in (state, inputs))
        placeholders = self._update.function.inputs[first : first + count]
        if any(placeholder.consumers() for placeholder in placeholders):
            return None

        def row(leaf: Any) -> Any:
            return None if leaf is None else tf.zeros([length or 1 for length in leaf.shape], leaf.dtype)

        return tf.nest.map_structure(row, inputs)

    def _function(self, function: Any) -> Any:
        return tf.function(function, autograph=False)

    def _create_variables(self, data: ScoringData) -> None:
        """Run one symbolic step, in which losses and metrics create their variables."""
        try:
            with keras.StatelessScope(self._regularized(), collect_losses=True):
                self._function(self._step).get_concrete_function(*data.as_arguments())
        except UNFIT as error:
            if misfit := self.misfit(data, error):
                raise InvalidInputError(misfit) from error
            raise

    def misfit(self, data: ScoringData, error: BaseException) -> str:
        """Return why a batch does not fit the loss or a metric by its shapes; empty if it fits each of them.

        Empty, too, if outputs have no targets. Code of the model's own may read anything, so that is blamed as a whole.

        Args:
            data: The batch, or its specification.
            error: What computing the score raised, or tracing it.
        """
        if self._options.custom_step:
            outputs = self._interface.outputs.specs
            return said_of_own_code(self._model, error, data.targets, data.sample_weights, outputs)
        if any(leaf is None for leaf in tf.nest.flatten(data.targets)):
            return ""
        return self._misfits.find(data.as_arguments())

    def _initial_values(self) -> list[Any]:
        with keras.StatelessScope() as scope:
            self._loss.reset_state()
            self._model.reset_metrics()
        values = ((scope.get_current_value(variable), variable) for variable in self._variables)
        return [tf.convert_to_tensor(variable.numpy() if value is None else value) for value, variable in values]

    def _trace_update(self, state: Sequence[Any], *data: Any) -> tuple[list[Any], dict[str, Any]]:
        self._on_trace()
        with tf.device(self._device), self.scope(state) as scope:
            logs = self._step(*data)
            logs = _as_tensors(logs)
        return [scope.get_current_value(variable) for variable in self._variables], logs

    def results(self, state: Sequence[Any]) -> dict[str, Any]:
        """Compute the loss and the metrics at a state.

        Runs eagerly, as Keras does, unless it is traced: an optimized graph may round differently.
        """
        with tf.device(self._device), self.scope(state):
            model = self._model if self._has_own_result else SimpleNamespace(metrics=self._metrics)
            results = self._results_of(model)
            if not self._options.custom_step:
                results.pop(LOSS, None)
            if self._options.with_loss:
                results[LOSS] = self._loss.result()
            return _as_tensors(results)

    def _results_of(self, model: Any) -> dict[str, Any]:
        try:
            return dict(type(self._model).get_metrics_result(model))
        except ValueError as error:
            if not self._options.custom_step:
                raise
            raise NotEvaluableError(
                f"the model's metrics have no result after its own test_step: {first_line(error)} Its test_step has to "
                "update the metrics that it is compiled with, as compute_metrics does; or compile it without metrics"
            ) from error

    def scope(self, state: Sequence[Any]) -> Any:
        """Return a context in which the variables of the loss and the metrics have these values."""
        pairs = zip(self._variables, state, strict=True)
        return keras.StatelessScope([*pairs, *self._regularized()], collect_losses=True)

    def _regularized(self) -> list[tuple[Any, Any]]:
        """Map the variables that have a regularizer to their values, which Keras reads in a stateless scope."""
        return [
            (variable, variable) for variable in self._model.trainable_variables if variable.regularizer is not None
        ]

    def _step(self, inputs: Any, targets: Any, weights: Any, outputs: Any, masks: Any) -> dict[str, Any]:
        if self._options.custom_step:
            data = keras.utils.pack_x_y_sample_weight(inputs, targets, weights)
            logs = self._model.test_step(data)
        else:
            logs = self.score(inputs, targets, weights, self.predictions(inputs, outputs, masks))
        return dict(logs) if self._options.keeps_logs else {}

    def score(self, inputs: Any, targets: Any, weights: Any, predictions: Any) -> Any:
        """Update the loss and the metrics with a batch, in the current scope."""
        if self._options.with_loss:
            self._add_loss(inputs, targets, predictions, weights)
        return self._model.compute_metrics(inputs, targets, predictions, sample_weight=weights)

    def predictions(self, inputs: Any, outputs: Mapping[str, Any], masks: Mapping[str, Any]) -> Any:
        """Return the outputs of the model in its structure, with their masks."""
        if self._options.calls_model:
            return self._model(inputs, training=False)
        for name, mask in masks.items():
            put_mask(outputs[name], mask)
        return alone(self._interface.outputs.unflatten(outputs))

    def _add_loss(self, inputs: Any, targets: Any, predictions: Any, weights: Any) -> None:
        loss = self._model.compute_loss(x=inputs, y=targets, y_pred=predictions, sample_weight=weights, training=False)
        counted = inputs if self.runs_model else predictions
        self._loss.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(counted)[0])[0])


def alone(structure: Any) -> Any:
    """Return the only element of a one-element list or tuple, else the structure, as Keras does with outputs."""
    return structure[0] if isinstance(structure, list | tuple) and len(structure) == 1 else structure


def _any_counts(*given: Any) -> Array:
    """Return which examples have an element that counts, from weights and a mask, ``[examples, ...]`` or None each."""
    counts = [np.asarray(each) != 0 for each in given if each is not None]
    axes = max(each.ndim for each in counts)
    together = np.logical_and.reduce(
        np.broadcast_arrays(*(each.reshape(*each.shape, *(1,) * (axes - each.ndim)) for each in counts))
    )
    return np.asarray(together.reshape(len(together), -1).any(axis=1))


def _as_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the variables that metrics may return, while the scope provides their values."""
    return {
        name: tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)
        for name, value in flattened(values)
    }


def _as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    floats: dict[str, float] = {}
    for name, value in values.items():
        array = np.asarray(value)
        if array.ndim == 0:
            floats[name] = float(array)
        else:
            floats.update({f"{name}/{index}": float(element) for index, element in enumerate(array.ravel())})
    return floats


class OutsideState:
    """The plain variables that a traced function uses, swapped in and out for each stream. Thread-safe.

    Args:
        function: The concrete function that updates metrics.
        model: The model; its variables are not part of the metrics' state.
    """

    def __init__(self, function: Any, model: Any) -> None:
        own = {id(component) for variable in model.variables for component in _components(variable.value)}
        self._variables = [variable for variable in function.variables if id(variable) not in own]
        self._lock = threading.Lock()
        self.initial: tuple[Any, ...] = self.read()

    @contextmanager
    def swapped_in(self, values: Sequence[Any]) -> Iterator[None]:
        """Set the variables to these values during a block, with exclusive access."""
        if not self._variables:
            yield
            return
        with self._lock:
            for variable, value in zip(self._variables, values, strict=True):
                variable.assign(value)
            yield

    def read(self) -> tuple[Any, ...]:
        """Return the current values of the variables."""
        return tuple(tf.identity(variable) for variable in self._variables)


def _components(variable: Any) -> Sequence[Any]:
    """Return the variables on the replicas, or the variable itself if there is only one."""
    return getattr(variable, "values", None) or [variable]
