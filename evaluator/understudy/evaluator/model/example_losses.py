"""Per-example losses, for models whose loss is defined per example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from understudy.checkpoints.keras_signature import ModelInterface
from understudy.compat import compiled_loss, loss_for, put_mask
from understudy.evaluator.model.scoring_program import ScoringData, alone
from understudy.evaluator.types import Array


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
            return compiled_loss(self._model, targets, predictions, weights)
