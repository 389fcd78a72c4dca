"""Creates slots on the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.model.direct_call import reclaim_memory
from understudy.evaluator.model.loaders import BuildModel, loader_for
from understudy.evaluator.model.slot import Slot


class ReplicaSlotFactory:
    """An `understudy.evaluator.serving.slot_pool.SlotFactory` of slots that share the replicas of one strategy.

    Args:
        strategy: A `tf.distribute.MirroredStrategy`.
        max_batch_size: The maximum number of examples of one call.
        on_trace: Called each time a function is traced.
        build_model: Builds the model for checkpoints that hold only variables; None if there is no such function.
    """

    def __init__(
        self, strategy: Any, *, max_batch_size: int, on_trace: Callable[[], None], build_model: BuildModel | None = None
    ) -> None:
        self._strategy = strategy
        self._max_batch_size = max_batch_size
        self._on_trace = on_trace
        self._build_model = build_model

    def build(self, checkpoint: LocalCheckpoint) -> Slot:
        """See `SlotFactory`."""
        loader = loader_for(checkpoint.kind, self._build_model)
        return Slot(
            self._strategy,
            checkpoint.model_file,
            max_batch_size=self._max_batch_size,
            loader=loader,
            on_trace=self._on_trace,
        )

    def architecture_of(self, checkpoint: LocalCheckpoint) -> str:
        """See `SlotFactory`."""
        return loader_for(checkpoint.kind, self._build_model).architecture_of(checkpoint.model_file)

    def reclaim(self) -> bool:
        """See `SlotFactory`."""
        return reclaim_memory()
