"""Builds the slots of a service, which share the replicas of one strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.model.loaders import BuildModel, loader_for
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.model.traced_call import reclaim_memory


class MirroredSlotFactory:
    """An `understudy.evaluator.serving.loading.SlotFactory` of slots on the replicas of one strategy.

    Args:
        strategy: A `tf.distribute.MirroredStrategy`.
        max_batch_size: The maximum number of examples of one call.
        on_trace: Called each time a function is traced.
        build_model: Builds the model for checkpoints that hold only variables; None if there is no such function.
        allow_unsafe_models: Whether a stored model may name any class, function and operation.
    """

    def __init__(
        self,
        strategy: Any,
        *,
        max_batch_size: int,
        on_trace: Callable[[], None],
        build_model: BuildModel | None,
        allow_unsafe_models: bool,
    ) -> None:
        self._strategy = strategy
        self._max_batch_size = max_batch_size
        self._on_trace = on_trace
        self._loader_for = functools.partial(
            loader_for, build_model=build_model, allow_unsafe_models=allow_unsafe_models
        )

    def build(self, checkpoint: LocalCheckpoint) -> Slot:
        """See `SlotFactory`."""
        loader = self._loader_for(checkpoint.kind)
        return Slot(
            self._strategy,
            checkpoint.model_file,
            max_batch_size=self._max_batch_size,
            loader=loader,
            on_trace=self._on_trace,
        )

    def architecture_of(self, checkpoint: LocalCheckpoint) -> str:
        """See `SlotFactory`."""
        return self._loader_for(checkpoint.kind).architecture_of(checkpoint.model_file)

    def reclaim(self) -> bool:
        """See `SlotFactory`."""
        return reclaim_memory()
