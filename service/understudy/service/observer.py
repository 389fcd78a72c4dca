"""What the service makes of what the evaluator tells."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationRecord
from understudy.service.metrics.engine import MetricsObserver

_RECALL_PAGE = 1000


class ServiceObserver(MetricsObserver):
    """Keeps the metrics, and passes on that there is something new in the ledger. Thread-safe.

    Args:
        registry: Where to register the metrics.
        on_record: Called on a thread of the evaluator after each entry.
    """

    def __init__(self, registry: CollectorRegistry, *, on_record: Callable[[], None]) -> None:
        super().__init__(registry)
        self._on_record = on_record

    def evaluation_recorded(self, record: EvaluationRecord) -> None:
        """An entry was committed to the ledger."""
        super().evaluation_recorded(record)
        self._on_record()

    def recall(self, ledger: Ledger) -> None:
        """Show the results of an earlier process, until there are newer ones. Blocks."""
        after = 0
        while entries := ledger.page(after_sequence=after, limit=_RECALL_PAGE):
            for entry in entries:
                super().evaluation_recorded(entry)
            after = entries[-1].sequence
