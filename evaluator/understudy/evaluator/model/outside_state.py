"""State that a user's metric keeps in plain TensorFlow variables, which Keras does not track."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


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
