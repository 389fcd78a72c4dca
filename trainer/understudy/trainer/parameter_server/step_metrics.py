"""Metrics of workers that do not wait for each other.

Keras reads, adds and overwrites a metric's state, so workers that shared one would lose updates. Instead each step
begins with a fresh state and returns it to the chief, which adds up the states of all steps, as a synchronous strategy
adds up those of its replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from understudy.compat import compiled_metrics
from understudy.trainer.loop import scalars

Array = npt.NDArray[Any]


class StepMetrics:
    """The loss and the compiled metrics since the last reset, over the steps of all workers.

    Args:
        model: Compiled, and its metrics built, but not updated yet.
    """

    def __init__(self, model: keras.Model) -> None:
        self._metric = compiled_metrics(model)
        variables = () if self._metric is None else self._metric.variables
        self._fresh: list[Array] = [np.asarray(variable) for variable in variables]
        self.reset()

    def state_after(self, y: Any, y_pred: Any, sample_weight: Any) -> list[tf.Tensor]:
        """Return, in a worker's graph, the state after these examples alone."""
        if self._metric is None:
            return []
        return list(self._metric.stateless_update_state(self._fresh, y, y_pred, sample_weight))

    def add(self, loss: npt.ArrayLike, state: Sequence[Array]) -> None:
        """Add a step's loss and its state."""
        self._losses.append(float(np.asarray(loss)))
        for index, (value, fresh) in enumerate(zip(state, self._fresh, strict=True)):
            self._totals[index] = self._totals[index] + (np.asarray(value, np.float64) - fresh)

    def results(self) -> dict[str, float]:
        """Return the results; there was at least one step."""
        metrics = {"loss": sum(self._losses) / len(self._losses)}
        if self._metric is not None:
            state = [tf.constant(total, fresh.dtype) for total, fresh in zip(self._totals, self._fresh, strict=True)]
            metrics |= scalars(self._metric.stateless_result(state))
        return metrics

    def reset(self) -> None:
        """Reset."""
        self._losses: list[float] = []
        self._totals = [fresh.astype(np.float64) for fresh in self._fresh]
