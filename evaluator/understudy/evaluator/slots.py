"""Makes slots on the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from understudy.evaluator.compute.model_file import architecture_of
from understudy.evaluator.compute.slot import Slot
from understudy.evaluator.errors import LoadError


class ReplicaSlots:
    """An `understudy.evaluator.lifecycle.loading.SlotFactory` of slots that share the replicas of one strategy.

    Args:
        strategy: A `tf.distribute.MirroredStrategy`.
        max_rows: The most rows of one call.
    """

    def __init__(self, strategy: Any, *, max_rows: int) -> None:
        self._strategy = strategy
        self._max_rows = max_rows

    def build(self, model_file: Path) -> Slot:
        """See `SlotFactory`."""
        try:
            return Slot(self._strategy, model_file, max_rows=self._max_rows)
        except LoadError as error:
            if _is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise

    def architecture_of(self, model_file: Path) -> str:
        """See `SlotFactory`."""
        return architecture_of(model_file)


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError):
            return True
        error = error.__cause__
    return False
