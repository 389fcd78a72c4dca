"""Each replica's own state: BatchNorm's moving statistics, dropout's seeds, and all other non-trained variables.

Keras 3 neither sums nor averages these, so replicas diverge. Exact resume needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from understudy.trainer.model import is_seed

Array = npt.NDArray[Any]

_SEED_STRIDE = 0x9E3779B9  # 2**32 divided by the golden ratio: spreads neighbouring replicas
_SEEDS = 2**31


class ReplicaState:
    """Reads and writes each replica's own value of a model's variables.

    In a cluster, all tasks call its methods together.

    Args:
        strategy: The strategy under which the model was built.
        variables: Variables that are not trained.
    """

    def __init__(self, strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]) -> None:
        self._strategy = strategy
        self._variables = list(variables)
        self._replica_ids = _local_replica_ids(strategy)
        self._gather = _gatherer(strategy, self._variables) if self._is_spread else None

    @property
    def _is_spread(self) -> bool:
        return bool(len(self._replica_ids) < self._strategy.num_replicas_in_sync)

    def read(self) -> list[Array]:
        """Return the values ``[replicas, ...]`` of each variable, for the replicas of all workers in order."""
        if self._gather is None:
            return [self._read_local(variable) for variable in self._variables]
        ids, values = self._gather()
        order = np.argsort(ids.numpy())
        return [value.numpy()[order] for value in values]

    def write(self, values: Sequence[Array]) -> None:
        """Assign each replica its entry of ``[replicas, ...]``; the shapes are those that `read` returns."""
        for variable, rows in zip(self._variables, values, strict=True):
            for replica_id, component in self._components(variable):
                component.assign(rows[replica_id])

    def seed_replicas(self) -> None:
        """Give every replica its own random numbers; replica 0 keeps those of one device."""
        for variable in filter(is_seed, self._variables):
            for replica_id, component in self._components(variable):
                seed, counter = (int(value) for value in component.numpy())
                component.assign([(seed + replica_id * _SEED_STRIDE) % _SEEDS if replica_id else seed, counter])

    def _components(self, variable: keras.Variable) -> list[tuple[int, tf.Variable]]:
        components = self._strategy.experimental_local_results(variable.value)
        return list(zip(self._replica_ids, components, strict=True))

    def _read_local(self, variable: keras.Variable) -> Array:
        rows: dict[int, Array] = {replica_id: part.numpy() for replica_id, part in self._components(variable)}
        return np.stack([rows[replica_id] for replica_id in sorted(rows)])


def average(variable: keras.Variable, values: Array) -> Array:
    """Return the value for a single model in place of all replicas.

    Args:
        variable: The variable.
        values: ``[replicas, ...]``.

    Returns:
        ``[...]``: the mean of floating-point values, and replica 0's value of everything else.
    """
    if keras.backend.is_float_dtype(variable.dtype):
        return np.asarray(values.astype(np.float64).mean(axis=0), values.dtype)
    return np.asarray(values[0])


def _local_replica_ids(strategy: tf.distribute.Strategy) -> tuple[int, ...]:
    @tf.function(autograph=False)
    def replica_ids() -> Any:
        return strategy.run(_replica_id)

    ids = replica_ids()
    return tuple(int(replica_id) for replica_id in strategy.experimental_local_results(ids))


def _replica_id() -> tf.Tensor:
    return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)


def _gatherer(
    strategy: tf.distribute.Strategy,
    variables: Sequence[keras.Variable],
) -> Callable[[], tuple[tf.Tensor, list[tf.Tensor]]]:
    """Return a function that gathers replica ids and values from all workers, each with an axis 0 of replicas."""

    def gather_row(value: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(tf.expand_dims(value, 0), axis=0)

    def gather_rows() -> tuple[tf.Tensor, list[tf.Tensor]]:
        return gather_row(_replica_id()), [gather_row(variable.value) for variable in variables]

    @tf.function(autograph=False)
    def gather() -> tuple[tf.Tensor, list[tf.Tensor]]:
        ids, values = strategy.run(gather_rows)
        # After a gather all replicas have the same values.
        return first_of(ids), [first_of(value) for value in values]

    def first_of(value: Any) -> tf.Tensor:
        return strategy.experimental_local_results(value)[0]

    return gather  # type: ignore[no-any-return]
