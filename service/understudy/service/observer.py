"""Turns the evaluator's events into metrics, statistics and notifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from understudy.evaluator.observer import Operation
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationRecord
from understudy.service.metrics.engine_metrics import MetricsObserver
from understudy.service.statistics import InferenceStatistics

_RECALL_PAGE = 1000


class ServiceObserver(MetricsObserver):
    """Keeps metrics and statistics, and reports new entries of the ledger. Thread-safe.

    Args:
        registry: Where to register the metrics.
        statistics: Keeps the statistics of every version.
        on_record: Called on one of the evaluator's threads after each entry.
    """

    def __init__(
        self, registry: CollectorRegistry, *, statistics: InferenceStatistics, on_record: Callable[[], None]
    ) -> None:
        super().__init__(registry)
        self._statistics = statistics
        self._on_record = on_record

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
        """A batch left the device."""
        super().batch_computed(
            operation,
            examples=examples,
            queue_seconds=queue_seconds,
            fill_seconds=fill_seconds,
            compute_seconds=compute_seconds,
        )
        if step is not None:
            self._statistics.batch_computed(
                step, examples=examples, queue_seconds=queue_seconds, compute_seconds=compute_seconds
            )

    def request_failed(self, *, step: int, seconds: float) -> None:
        """The computation of a Predict request failed."""
        self._statistics.request_failed(step, seconds=seconds)

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger."""
        super().evaluation_recorded(record)
        self._on_record()

    def recall(self, ledger: Ledger) -> None:
        """Show the results of an earlier process until newer ones are recorded. Blocks."""
        after = 0
        while entries := ledger.page(after_sequence=after, limit=_RECALL_PAGE):
            for entry in entries:
                super().evaluation_recorded(entry)
            after = entries[-1].sequence
