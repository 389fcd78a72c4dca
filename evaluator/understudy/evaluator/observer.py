"""The events of which an evaluator notifies its observer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from understudy.checkpoints.signature import Signature as Signature  # noqa: PLC0414 - re-exported
from understudy.checkpoints.signature import TensorSpec as TensorSpec  # noqa: PLC0414 - re-exported
from understudy.devices.nvml import GpuReading as GpuReading  # noqa: PLC0414 - re-exported
from understudy.evaluator.types import CheckpointInfo, EvaluationRecord, LifeEvent

Operation = Literal["predict", "evaluate"]

LoadOutcome = Literal["loaded", "failed", "postponed"]

Milestone = Literal["scored", "served"]

FreezeOutcome = Literal["frozen", "left", "cancelled", "failed"]


class Observer(Protocol):
    """Receives events as they happen. Methods are called from several threads and must be quick and must not raise."""

    def batch_computed(
        self,
        operation: Operation,
        *,
        examples: int,
        queue_seconds: Sequence[float],
        fill_seconds: float,
        compute_seconds: float,
        step: int | None = None,
        tokens: Sequence[object] = (),
    ) -> None:
        """A batch is done; its outcomes are delivered next.

        Called by one thread at a time, also while several batches run at once.

        Args:
            operation: The operation that the batch was for.
            examples: Its number of examples, without padding.
            queue_seconds: How long each of its requests had waited before the batch was closed.
            fill_seconds: How long the batch was held open for more requests.
            compute_seconds: From the call of the function until the outputs are in host memory.
            step: The step of the checkpoint that computed a Predict batch; None for Evaluate.
            tokens: The callers of the requests of a Predict batch, by their tokens; see `ResultSink`.
        """

    def request_failed(self, *, step: int, seconds: float) -> None:
        """A Predict request failed at this step, ``seconds`` after its arrival."""

    def queue_changed(self, examples: int) -> None:
        """The queue now holds this many examples."""

    def rejected(self, reason: str) -> None:
        """A request was refused or dropped.

        The reason is ``queue_full``, ``deadline`` (it has passed), ``unmeetable`` (it would pass before the queued
        requests are done), ``cancelled``, ``invalid`` or ``draining``.
        """

    def function_traced(self) -> None:
        """TensorFlow traced a function, which is slow: for a new checkpoint, or for a new combination of metrics."""

    def checkpoint_loaded(self, outcome: LoadOutcome, *, seconds: float) -> None:
        """An attempt to load a checkpoint ended."""

    def evaluation_waited(self, seconds: float) -> None:
        """An evaluation of a dataset ended; so long it had waited for examples, with nothing to compute."""

    def checkpoint_reached(self, milestone: Milestone, *, seconds: float) -> None:
        """A checkpoint has a result on every dataset, or began to serve, ``seconds`` after it was written.

        Called for checkpoints that were written since the evaluator started; for ``served``, once for each.
        """

    def life_changed(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """Something happened to a checkpoint just now. One that was seen is still to be evaluated."""

    def freezing_ended(self, outcome: FreezeOutcome, *, seconds: float) -> None:
        """An attempt to make constants of the serving version's weights ended.

        They are ``frozen``; or ``left`` as variables, for a reason that the log gives; or it was ``cancelled`` for a
        newer version; or it ``failed``.
        """

    def frozen_memory_changed(self, size: int) -> None:
        """The constants now take about this many bytes."""

    def cluster_changed(self, nodes: int) -> None:
        """The cluster now has this many nodes that compute evaluations."""

    def cluster_failed(self) -> None:
        """An evaluation was put off, because the cluster cannot be used."""

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger."""


class SilentObserver:
    """An observer that ignores all events."""

    def batch_computed(self, operation: Operation, **measured: Any) -> None:
        """See `Observer`."""

    def request_failed(self, *, step: int, seconds: float) -> None:
        """See `Observer`."""

    def queue_changed(self, examples: int) -> None:
        """See `Observer`."""

    def rejected(self, reason: str) -> None:
        """See `Observer`."""

    def function_traced(self) -> None:
        """See `Observer`."""

    def checkpoint_loaded(self, outcome: LoadOutcome, *, seconds: float) -> None:
        """See `Observer`."""

    def evaluation_waited(self, seconds: float) -> None:
        """See `Observer`."""

    def checkpoint_reached(self, milestone: Milestone, *, seconds: float) -> None:
        """See `Observer`."""

    def life_changed(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """See `Observer`."""

    def freezing_ended(self, outcome: FreezeOutcome, *, seconds: float) -> None:
        """See `Observer`."""

    def frozen_memory_changed(self, size: int) -> None:
        """See `Observer`."""

    def cluster_changed(self, nodes: int) -> None:
        """See `Observer`."""

    def cluster_failed(self) -> None:
        """See `Observer`."""

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """See `Observer`."""
