"""Builds a user's model for training, and refuses models that the loop would train incorrectly."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from understudy.compat import build_for, mask_of, repair_open_axes, without_automatic_xla
from understudy.compat.error_texts import first_line
from understudy.experiments import Experiment
from understudy.experiments.experiment_errors import error_of_code
from understudy.trainer.gradients import sum_before_applying
from understudy.trainer.trainer_errors import ModelError

_log = logging.getLogger(__name__)


def build_model(experiment: Experiment, *, seed: int) -> keras.Model:
    """Build an experiment's model, with its optimizer's variables, in the current strategy's scope if there is one.

    Raises:
        ExperimentError: The user's code raised.
        ModelError: The result is not a built and compiled model, or the loop cannot train it.
    """
    keras.utils.set_random_seed(seed)
    repair_open_axes()
    with without_automatic_xla():  # with it, the numbers of a training would depend on the machine
        try:
            model = experiment.build_model()
        except Exception as error:
            raise error_of_code(experiment.name, "build_model()", error) from error
    _check(model)
    model.optimizer.build(model.trainable_variables)
    return model


def prepare_for_replicas(model: keras.Model, strategy: tf.distribute.Strategy, element_spec: Any) -> None:
    """Create the variables that Keras would create at its first step, which is too late inside the loop's graph.

    Args:
        model: From `build_model`, called in the strategy's scope.
        strategy: That strategy.
        element_spec: The spec of a global batch.

    Raises:
        ModelError: The model cannot be trained exactly on several replicas, or not under the strategy.
    """
    _check_xla(model, strategy)
    known = {id(variable) for variable in model.trainable_variables}
    with strategy.scope():
        try:
            build_for(model, element_spec)
        except (ValueError, TypeError) as error:
            raise ModelError(
                "Keras cannot apply the model and its compiled loss and metrics to the training data: "
                f"{first_line(error)}; {_remedy(model, element_spec)}"
            ) from error
    unknown = [variable.path for variable in model.trainable_variables if id(variable) not in known]
    if unknown:  # to the optimizer and to the evaluator's model
        raise ModelError(
            f"build_model() returned a model without all of its variables ({unknown[0]} came with the training data); "
            "call it on an example, model(example), before it is returned"
        )
    if strategy.num_replicas_in_sync > 1:
        _check_loss(model)
        sum_before_applying(model.optimizer)


def has_variables(model: keras.Model) -> bool:
    """Whether a model is built; after `build`, the layers of a subclassed one are not until it is called."""
    return bool(model.built and (model.weights or all(layer.built for layer in model.layers)))


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`: int64 ``[seed, counter]``."""
    return str(variable.path).rpartition("/")[2] == "seed_generator_state"


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ModelError(f"build_model() returned a {type(model).__name__}; expected a keras.Model")
    if not model.compiled:
        raise ModelError("build_model() returned a model that is not compiled; call model.compile(optimizer, loss)")
    if getattr(model, "optimizer", None) is None:
        raise ModelError("build_model() returned a model without an optimizer; call model.compile(optimizer, loss)")
    if not has_variables(model):
        raise ModelError(
            "build_model() returned a model without variables; give it an Input, or call it on an example, "
            "model(example)"
        )
    try:
        _warn_of_unregistered(model.get_compile_config())
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the arguments of compile() cannot be saved with the model: {error}; give losses and metrics as names or "
            "objects, not as classes"
        ) from error
    if model.run_eagerly:
        raise ModelError("the model is compiled with run_eagerly=True; the loop runs in a graph, so leave that out")


def _warn_of_unregistered(compiled: Mapping[str, Any]) -> None:
    for argument in ("loss", "metrics", "weighted_metrics"):
        try:
            keras.saving.deserialize_keras_object({argument: compiled.get(argument)})
        except (ValueError, TypeError) as error:
            _log.warning(
                "the evaluator cannot load what this training publishes, as a loss or metric is not registered: put "
                "@keras.saving.register_keras_serializable() before it",
                extra={"argument": argument, "reason": str(error).partition(". ")[0]},
            )


def _remedy(model: keras.Model, element_spec: Any) -> str:
    """Return what helps if a global batch of this spec does not fit the model or what it is compiled with."""
    leaves, inputs = keras.tree.flatten(element_spec[0]), keras.tree.flatten(getattr(model, "inputs", None) or [])
    if len(leaves) == len(inputs) and any(
        leaf.shape.rank == len(expected.shape) + 1 for leaf, expected in zip(leaves, inputs, strict=True)
    ):
        return (
            "the elements of training_data() have an axis more than an example of the model: leave out batch(), as the "
            "trainer makes the batches"
        )
    return "check the arguments of compile(), and the structure of the data"


def _check_xla(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    alone = strategy is tf.distribute.get_strategy() or isinstance(strategy, tf.distribute.OneDeviceStrategy)
    if model.jit_compile and not alone:
        raise ModelError(
            "the model is compiled with jit_compile=True, which TensorFlow cannot do under a strategy of several "
            "replicas (their gradients are added up within the step); leave it out, or train with strategy one_device",
        )


def _check_loss(model: keras.Model) -> None:
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", None) == "mean_with_sample_weight":
            raise ModelError(
                f"the loss {loss.name!r} is divided by the sum of the sample weights, which each replica would do for "
                "its own part of the batch; use reduction='sum_over_batch_size', or strategy one_device",
            )
    if any(mask_of(output) is not None for output in getattr(model, "outputs", None) or ()):
        _log.warning(
            "the model's output is masked: every replica takes the mean over its own unmasked part, as in Keras' fit, "
            "so that the weights differ a little from those of one device",
        )
