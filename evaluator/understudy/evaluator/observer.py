"""The interface for metrics and monitoring of the evaluator, and the health of its devices."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from understudy.evaluator.types import EvaluationRecord

END_AFTER = 2
"""The devices have failed permanently after this multiple of the failures that make them ``FAILING``."""

Operation = Literal["predict", "evaluate"]
LoadOutcome = Literal["loaded", "failed", "postponed"]


class DeviceState(enum.Enum):
    """The health of the devices."""

    WORKING = "working"
    FAILING = "failing"
    FAILED = "failed"


DeviceListener = Callable[[DeviceState, str], None]
"""Called with the new state and the last error; must be quick and must not raise."""


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
    ) -> None:
        """A batch is done. Called by one thread at a time, because batches run one at a time.

        Args:
            operation: The operation that the batch was for.
            examples: Its number of examples, without padding.
            queue_seconds: How long each of its requests had waited before the batch was closed.
            fill_seconds: How long the batch was held open for more requests.
            compute_seconds: From the call of the function until the outputs are in host memory.
            step: The step of the checkpoint that computed a Predict batch; None for Evaluate.
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

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger."""


class SilentObserver:
    """An observer that ignores all events."""

    def batch_computed(
        self,
        operation: Operation,
        *,
        examples: int,
        queue_seconds: Sequence[float],
        fill_seconds: float,
        compute_seconds: float,
        step: int | None = None,
    ) -> None:
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

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """See `Observer`."""
