"""Compiles a model for scoring: as it was saved, with the caller's metrics, or for the losses of examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.compat import compiled_loss, loss_for, put_mask
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import InvalidInputError, NotEvaluableError
from understudy.evaluator.model import metric_catalog
from understudy.evaluator.model.metric_digests import digest_of, without_names
from understudy.evaluator.model.misfits import UNFIT
from understudy.evaluator.model.scoring_program import ProgramOptions, ScoringData, alone
from understudy.evaluator.types import Array, MetricSpec

_METRICS = ("metrics", "weighted_metrics")
"""The arguments of ``compile`` that hold metrics."""


_IRRELEVANT = frozenset({"optimizer", "run_eagerly", "steps_per_execution", "jit_compile", "auto_scale_loss"})
"""The arguments of ``compile`` that do not change a score."""


_REGISTER = (
    "if it is your own, put @keras.saving.register_keras_serializable() before it in the experiment's file and give "
    "that with --experiment, with which the checkpoints that are there can be scored, too"
)


class NoExampleLossesError(ValueError):
    """There are no per-example losses. The text gives the reason, to follow "because"."""


class PerExampleLoss(keras.losses.Loss):
    """A loss without its reduction: the mean of an example's elements, weighted by the sample weights, ``[examples]``.

    Masked elements count as 0.

    Args:
        loss: A loss argument of `compile` for one output: a loss, a function or a name.
    """

    def __init__(self, loss: Any) -> None:
        super().__init__(name="example_loss", reduction="none")
        self._loss = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """See the class."""
        loss = loss_for(self._loss, y_true, y_pred)
        loss.reduction = "none"
        values = loss(y_true, y_pred, sample_weight)
        if len(values.shape) == 0:
            raise NoExampleLossesError("its loss is computed of the batch as a whole")
        return keras.ops.mean(values, axis=tuple(range(1, len(values.shape)))) if len(values.shape) > 1 else values


class PerExampleLosses:
    """The traced function that computes the losses of a batch's examples. Thread-safe.

    For several outputs, it is the total with the compiled weights. Regularization terms are excluded. Building one
    needs exclusive use of the model, compiled with `PerExampleLoss`es.

    Args:
        model: The compiled model.
        interface: The structures of its inputs and outputs.
        device: The device to compute on.
        calls_model: Whether to call the model on the whole batch, instead of using the gathered outputs.
        data: The specification of the batches.

    Raises:
        NoExampleLossesError: The loss is a single number for the whole batch.
    """

    def __init__(
        self, model: Any, interface: ModelInterface, *, device: str, calls_model: bool, data: ScoringData
    ) -> None:
        self._model = model
        self._interface = interface
        self._device = device
        self._calls_model = calls_model
        self._function = tf.function(self._trace, autograph=False).get_concrete_function(*data.as_arguments())

    def __call__(self, data: ScoringData) -> Array:
        """Return the losses of a batch's examples, float64 ``[examples]``."""
        return np.asarray(self._function(*data.as_arguments()), np.float64)

    def _trace(self, inputs: Any, targets: Any, weights: Any, outputs: Mapping[str, Any], masks: Any) -> Any:
        with tf.device(self._device), keras.StatelessScope(collect_losses=True):
            for name, mask in masks.items():
                put_mask(outputs[name], mask)
            if self._calls_model:
                predictions = self._model(inputs, training=False)
            else:
                predictions = alone(self._interface.outputs.unflatten(outputs))
            return compiled_loss(self._model)(targets, predictions, weights)


class Compilation:
    """Compiles a model repeatedly, each time with new losses and metrics, and never with an optimizer.

    Args:
        model: A model that is not compiled.
        interface: The structures of its inputs and outputs.
        config: The serialized compile arguments of the saved model; empty if it was not compiled.
    """

    def __init__(self, model: Any, interface: ModelInterface, config: Mapping[str, Any]) -> None:
        self._model = model
        self._interface = interface
        self._config = config
        kind = type(model)
        self._custom_compile = kind.compile is not keras.Model.compile
        self._restorable = bool(config) and (
            not self._custom_compile or kind.compile_from_config is not keras.Model.compile_from_config
        )
        self.custom_metrics = kind.compute_metrics is not keras.Model.compute_metrics
        self.custom_step = kind.test_step is not keras.Model.test_step
        self.custom_loss = kind.compute_loss is not keras.Model.compute_loss

    @property
    def metric_digest(self) -> str:
        """Identifies the configuration of the compiled losses and metrics; the names of losses are no part of it."""
        config = {name: argument for name, argument in self._config.items() if name not in _IRRELEVANT}
        if "loss" in config:
            config["loss"] = without_names(config["loss"])
        return digest_of(config)

    @property
    def _loss_digest(self) -> str:
        """Identifies the configuration of the compiled losses and their weights."""
        return digest_of([without_names(self._config.get("loss")), self._config.get("loss_weights")])

    def options(self, metrics: Sequence[MetricSpec], *, calls_model: bool, adds_losses: bool) -> ProgramOptions:
        """Return the options to score with the given metrics, or with the compiled ones if empty.

        Args:
            metrics: The caller's metrics.
            calls_model: Whether the model must see whole batches.
            adds_losses: Whether the model adds losses when it is called.

        Raises:
            NotEvaluableError: The model was not compiled, and no metric is named.
        """
        if not metrics and self._config and not self._restorable:
            raise NotEvaluableError(
                f"{type(self._model).__name__} has a compile method of its own, so Keras restores neither loss nor "
                "metrics; name the metrics, or give the class a compile_from_config method, too"
            )
        if not metrics and not self._restorable:
            raise NotEvaluableError(
                "the checkpoint holds no compile configuration, so there is no loss and no metric to score it with; "
                "save a compiled model, or name the metrics"
            )
        runs_own_step = not metrics and (self.custom_step or self.custom_loss)
        standard = not (self.custom_step or self.custom_loss or self._custom_compile)
        return ProgramOptions(
            calls_model=calls_model,
            custom_step=runs_own_step,
            with_loss=not runs_own_step and standard and self._has_loss(adds_losses=adds_losses),
            loss_of_targets=standard and not adds_losses and self._config.get("loss") is not None,
            keeps_logs=not metrics and (self.custom_step or self.custom_metrics),
            loss_digest=self._loss_digest,
            metric_digest=digest_of([self.metric_digest, [[each.name, dict(each.config)] for each in metrics]]),
        )

    def compile(self, metrics: Sequence[MetricSpec]) -> None:
        """Compile the model with new losses, and new metrics: the given ones, or those it was saved with."""
        if metrics or not self._custom_compile:
            self._compile_standard(metrics)
        else:
            self._model.compile_from_config(dict(self._config))
            self._model.optimizer = None

    @contextmanager
    def naming_the_part(self, metrics: Sequence[MetricSpec]) -> Iterator[None]:
        """Raise NotEvaluableError for an error that a compiled loss or metric causes, not Keras's about the whole.

        Args:
            metrics: The caller's metrics; with any, the compiled ones are not used.
        """
        try:
            yield
        except (*UNFIT, InvalidInputError):
            if not self._custom_compile:
                _check_compiled_loss(self._config)
                if not metrics:
                    _check_compiled_metrics(self._config)
            raise

    def compile_for_examples(self, *, adds_losses: bool) -> None:
        """Compile the model with per-example losses and without metrics.

        Raises:
            NoExampleLossesError: The model's loss is not a sum over examples.
        """
        if self.custom_step or self.custom_loss or self._custom_compile:
            raise NoExampleLossesError("the model computes its loss in a way of its own")
        if adds_losses:
            raise NoExampleLossesError("the model adds losses that depend on whole batches")
        losses = keras.saving.deserialize_keras_object({"loss": self._config.get("loss")})["loss"]
        if losses is None:
            raise NoExampleLossesError("the model was compiled without a loss")
        keras.Model.compile(
            self._model,
            optimizer=None,
            loss=keras.tree.map_structure(lambda loss: None if loss is None else PerExampleLoss(loss), losses),
            loss_weights=self._config.get("loss_weights"),
            jit_compile=False,
        )

    def _compile_standard(self, metrics: Sequence[MetricSpec]) -> None:
        unused = {"optimizer", *(_METRICS if metrics else ())}
        kept = {} if self._custom_compile else self._config
        config = {name: argument for name, argument in kept.items() if name not in unused}
        arguments = keras.saving.deserialize_keras_object(config)
        if metrics:
            arguments.update(metrics=self._per_output(metrics), weighted_metrics=None)
        keras.Model.compile(self._model, **{**arguments, "optimizer": None, "jit_compile": False})

    def _per_output(self, metrics: Sequence[MetricSpec]) -> Any:
        """Return separate metrics for every output, or for the one that they name."""
        names = self._interface.outputs.names
        named = [_of_output(spec, names) for spec in metrics]
        own = {name: [_metric(spec) for output, spec in named if output in ("", name)] for name in names}
        return own[names[0]] if len(names) == 1 else self._interface.outputs.unflatten(own)

    def _has_loss(self, *, adds_losses: bool) -> bool:
        regularized = any(variable.regularizer is not None for variable in self._model.trainable_variables)
        return bool(self._config) and (adds_losses or regularized or self._config.get("loss") is not None)


def _check_compiled_loss(config: Mapping[str, Any]) -> None:
    """Raise NotEvaluableError if Keras cannot make a loss of what the model was compiled with."""
    for place, given in _serialized(config.get("loss"), "loss"):
        try:
            keras.losses.get(keras.saving.deserialize_keras_object(given) if isinstance(given, dict) else given)
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise NotEvaluableError(
                f"the model was compiled with {place}={_shown(given)}, of which Keras makes no loss "
                f"({_reason(error)}); {_REGISTER}"
            ) from error


def _check_compiled_metrics(config: Mapping[str, Any]) -> None:
    """Raise NotEvaluableError if Keras cannot make a metric of what the model was compiled with."""
    for argument in _METRICS:
        for place, given in _serialized(config.get(argument), argument):
            try:
                metric = keras.saving.deserialize_keras_object(given) if isinstance(given, dict) else given
                is_by_shape = isinstance(metric, str) and metric.lower() in metric_catalog.CHOSEN_BY_SHAPE
                usable = is_by_shape or keras.metrics.get(metric) is not None
                reason = "there is no such metric"
            except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
                usable, reason = False, _reason(error)
            if not usable:
                raise NotEvaluableError(
                    f"the model was compiled with {place}={_shown(given)}, which is no metric ({reason}); {_REGISTER}; "
                    "or name the metrics to score with"
                )


def _reason(error: Exception) -> str:
    """Return the first sentence of an error; Keras goes on with its own remedy and the whole configuration."""
    return first_line(error).partition(". ")[0]


def _serialized(given: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield each loss or metric of a compile argument, as it was saved, and its place; None means none."""
    if isinstance(given, dict) and "class_name" not in given:
        for name, inner in given.items():
            yield from _serialized(inner, f"{place}[{name!r}]")
    elif isinstance(given, list | tuple):
        for index, inner in enumerate(given):
            yield from _serialized(inner, f"{place}[{index}]")
    elif given is not None:
        yield place, given


def _shown(given: Any) -> str:
    if isinstance(given, dict):
        given = given["config"] if isinstance(given.get("config"), str) else given["class_name"]
    return repr(given)[:64]


def check_metrics(metrics: Sequence[MetricSpec], outputs: Sequence[str]) -> None:
    """Raise InvalidInputError for a metric that is neither in the catalog nor registered, or has invalid arguments.

    Args:
        metrics: The metrics.
        outputs: The names of the model's outputs.
    """
    metric_catalog.check_count(metrics)
    for spec in metrics:
        output, of_output = _of_output(spec, outputs)
        if not output and "/" in spec.name and keras.saving.get_registered_object(spec.name) is None:
            raise InvalidInputError(f"metric {spec.name[:64]!r} is of no output; there are {list(outputs)}")
        _metric(of_output)


def _of_output(spec: MetricSpec, outputs: Sequence[str]) -> tuple[str, MetricSpec]:
    """Return the output that a metric is named for, as ``output/metric``, and the metric; empty for all outputs."""
    output, _, name = spec.name.rpartition("/")
    return (output, replace(spec, name=name)) if output in outputs else ("", spec)


def _metric(spec: MetricSpec) -> Any:
    """Return a name if Keras chooses the metric by the shapes of the data, else a metric object."""
    if spec.name.lower() in metric_catalog.CHOSEN_BY_SHAPE and not spec.config:
        return spec.name
    class_name = metric_catalog.class_named(spec.name)
    if class_name is None:
        return _registered_metric(spec)
    metric_catalog.check_configuration(spec)
    return _called(spec, getattr(keras.metrics, class_name), {"name": spec.name, **spec.config})


def _registered_metric(spec: MetricSpec) -> Any:
    """Return a metric that the experiment or an installed package registered with Keras."""
    registered = keras.saving.get_registered_object(spec.name)
    is_class = isinstance(registered, type)
    if registered is None or (is_class and not issubclass(registered, keras.metrics.Metric)):
        raise InvalidInputError(
            f"metric {spec.name[:64]!r} is unknown; give a metric of keras.metrics such as 'AUC', or the registered "
            "name of one of the experiment's own"
        )
    if spec.config:
        raise InvalidInputError(f"metric {spec.name!r} is the experiment's own, which takes no configuration")
    return _called(spec, registered, {"name": spec.name.rpartition(">")[2]}) if is_class else registered


def _called(spec: MetricSpec, kind: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return kind(**arguments)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(
            f"metric {spec.name!r} with {dict(spec.config)} cannot be created by Keras: {first_line(error)}"
        ) from error
