"""Records evaluations; the only writer of the ledger, the results and the summaries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.ledger import WHOLE_CHECKPOINT, Ledger
from understudy.evaluator.records.result_files import ResultFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, EvaluationResult

_log = logging.getLogger(__name__)

_PAGE = 1000


class Recorder:
    """Writes each entry to the ledger, then to the results, the summaries and the listeners. Thread-safe.

    The ledger is the source of truth and is written first. If a result file or summary cannot be written, that is
    logged and the entry stays; `recover` writes the missing files.

    Args:
        ledger: Holds every entry.
        results: Files for the trainer.
        summaries: Event files for TensorBoard.
        datasets: The datasets that each checkpoint is scored on.
        observer: Notified of each new entry.
        listener: Called with each new entry; must be quick and must not raise.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        results: ResultFiles,
        summaries: Summaries,
        datasets: Sequence[EvaluationDataset],
        observer: Observer,
        listener: Callable[[EvaluationRecord], None],
    ) -> None:
        self._ledger = ledger
        self._results = results
        self._summaries = summaries
        self.datasets = tuple(datasets)
        self._observer = observer
        self._listener = listener
        self._lock = threading.Lock()
        self._recorded = ledger.identities()

    def remaining(self, step: int, digest: str) -> list[EvaluationDataset]:
        """Return the datasets without a final record for a checkpoint, in the order of scoring."""
        if (step, digest, WHOLE_CHECKPOINT, "") in self._recorded:
            return []
        return [
            dataset for dataset in self.datasets if (step, digest, dataset.name, dataset.digest) not in self._recorded
        ]

    def score(self, step: int, digest: str, dataset: EvaluationDataset) -> EvaluationRecord | None:
        """Return the recorded score of a checkpoint on a dataset, or None."""
        return self._ledger.find(
            step=step,
            checkpoint_digest=digest,
            dataset=dataset.name,
            dataset_digest=dataset.digest,
            outcome=EvaluationOutcome.SCORED,
        )

    def record_score(
        self, digest: str, dataset: EvaluationDataset, result: EvaluationResult, *, duration_seconds: float
    ) -> EvaluationRecord:
        """Record a score.

        Raises:
            LedgerError: The ledger cannot be written.
        """
        with self._lock:
            before = self._ledger.last_sequence
            record = self._ledger.append(
                step=result.step,
                checkpoint_digest=digest,
                dataset=dataset.name,
                dataset_digest=dataset.digest,
                outcome=EvaluationOutcome.SCORED,
                metrics=result.metrics,
                examples=result.examples,
                duration_seconds=duration_seconds,
                notes=result.notes,
            )
            self._recorded.add((record.step, digest, dataset.name, dataset.digest))
            self._tell(record, new=record.sequence > before)
        return record

    def record_reason(
        self,
        step: int,
        digest: str,
        outcome: EvaluationOutcome,
        reason: str,
        *,
        dataset: EvaluationDataset | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> EvaluationRecord:
        """Record why a checkpoint has no score on a dataset, or on any if none is given, or the gate's decision.

        Raises:
            LedgerError: The ledger cannot be written.
        """
        with self._lock:
            before = self._ledger.last_sequence
            record = self._ledger.append(
                step=step,
                checkpoint_digest=digest,
                dataset=dataset.name if dataset else WHOLE_CHECKPOINT,
                dataset_digest=dataset.digest if dataset else "",
                outcome=outcome,
                reason=reason,
                metrics=metrics,
            )
            self._recorded.add((step, digest, record.dataset, dataset.digest if dataset else ""))
            self._tell(record, new=record.sequence > before)
        return record

    def steps(self) -> list[int]:
        """Return the steps with a record, ascending.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        return self._ledger.steps()

    def recover(self) -> None:
        """Write the result files and summaries that are missing after a crash or a full disk.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        with self._lock:
            newest = self._ledger.page(after_sequence=self._ledger.last_sequence - 1, limit=1)
            for step in self._ledger.steps():
                if not self._results.path(step).exists() or (newest and newest[0].step == step):
                    self._publish(step)
            try:
                self._summaries.complete(self._scores())
            except OSError:
                _log.exception("summaries not completed")

    def _scores(self) -> Iterator[EvaluationRecord]:
        after = 0
        while page := self._ledger.page(after_sequence=after, limit=_PAGE, outcome=EvaluationOutcome.SCORED):
            yield from page
            after = page[-1].sequence

    def close(self) -> None:
        """Close the summaries; the owner of the ledger closes the ledger. Idempotent."""
        with self._lock:
            self._summaries.close()

    def _tell(self, record: EvaluationRecord, *, new: bool) -> None:
        if not new:
            return
        _log.info(
            "evaluation recorded",
            extra={
                "step": record.step,
                "dataset": record.dataset,
                "outcome": record.outcome.value,
                "reason": record.reason,
                "metrics": dict(record.metrics),
            },
        )
        self._publish(record.step)
        if record.outcome is EvaluationOutcome.SCORED:
            self._summarize(record)
        self._listener(record)
        self._observer.evaluation_recorded(record)

    def _summarize(self, record: EvaluationRecord) -> None:
        try:
            self._summaries.write(record)
        except OSError:
            _log.exception("summary not written", extra={"step": record.step, "dataset": record.dataset})

    def _publish(self, step: int) -> None:
        records = self._ledger.of_step(step)
        settled = not self.remaining(step, records[-1].checkpoint_digest)
        try:
            self._results.publish(step, records, settled=settled)
        except OSError:
            _log.exception("result file not written", extra={"step": step})
