"""Records evaluations in the ledger, in files for the trainer, and in summaries for TensorBoard."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recovery import Recovery
from understudy.evaluator.records.result_files import ResultFiles, TableFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.step_changes import StepChanges
from understudy.evaluator.types import (
    WHOLE_CHECKPOINT,
    Arrays,
    CheckpointKey,
    EvaluationOutcome,
    EvaluationRecord,
    EvaluationResult,
    GateCondition,
)

_log = logging.getLogger(__name__)

ROLLOUT_CONTENT = "rollout"
"""Tells the entries of rollouts from those that settle a checkpoint as a whole, which have no dataset either."""

_REMOVALS = 20
"""Old entries are removed when the ledger has grown by this fraction of the number to keep."""


def entry_of(
    result: EvaluationResult, digest: str, dataset: EvaluationDataset, *, duration_seconds: float, metric_digest: str
) -> EvaluationRecord:
    """Return the entry of a score, which is not written yet.

    Args:
        result: The score.
        digest: The digest of the checkpoint.
        dataset: The dataset.
        duration_seconds: How long it took.
        metric_digest: Identifies the configuration of the metrics.
    """
    return EvaluationRecord(
        step=result.step,
        checkpoint_digest=digest,
        dataset=dataset.name,
        dataset_digest=dataset.digest,
        outcome=EvaluationOutcome.SCORED,
        metrics=result.metrics,
        examples=result.examples,
        duration_seconds=duration_seconds,
        notes=result.notes,
        intervals=result.intervals,
        slices=result.slices,
        resamples=result.resamples,
        confidence=result.confidence,
        metric_digest=metric_digest,
        metric_digests=result.metric_digests,
        undefined=result.undefined,
    )


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
        listener: Called with each new entry as soon as the ledger has it; must be quick and must not raise.
        on_written: Called with each new entry once all files are written; must be quick and must not raise.
        keep: How many entries `remove_old` keeps; None for all.
        tables: Files for the tables of evaluations; None if there never are any.

    Attributes:
        changes: Notes the steps that have a new entry, or are to be scored on one more dataset.
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
        on_written: Callable[[EvaluationRecord], None] = lambda _: None,
        keep: int | None = None,
        tables: TableFiles | None = None,
    ) -> None:
        self._ledger = ledger
        self._results = results
        self._summaries = summaries
        self.datasets = tuple(datasets)
        self._observer = observer
        self._listener = listener
        self._on_written = on_written
        self._keep = keep
        self._tables = tables
        self._removed_up_to = 0
        self._lock = threading.Lock()
        self._recovery = Recovery(
            ledger=ledger, results=results, summaries=summaries, publish=self._publish, lock=self._lock
        )
        self._recorded = ledger.identities()
        self._contents = ledger.contents()
        self._requested: dict[CheckpointKey, dict[str, EvaluationDataset]] = {}
        self.changes = StepChanges()

    def check_present(self) -> None:
        """Raise LedgerError if the ledger is no longer where it was opened."""
        self._ledger.check_present()

    @property
    def has_no_ledger(self) -> bool:
        """Whether nothing is where the ledger was opened."""
        return self._ledger.has_no_file

    def remaining(self, step: int, digest: str) -> list[EvaluationDataset]:
        """Return the datasets without a final record for a checkpoint, in the order of scoring."""
        if (step, digest, WHOLE_CHECKPOINT, "") in self._recorded:
            return []
        wanted = [*self.datasets, *self._requested.get((step, digest), {}).values()]
        return [dataset for dataset in wanted if (step, digest, dataset.name, dataset.digest) not in self._recorded]

    def request(self, step: int, digest: str, dataset: EvaluationDataset) -> bool:
        """Have a checkpoint scored on one more dataset; return whether that remains to be done."""
        requested = self._requested.setdefault((step, digest), {})
        with self._lock:
            self._requested[step, digest] = {**requested, dataset.name: dataset}
        self.changes.note(step)
        return dataset.name in {remaining.name for remaining in self.remaining(step, digest)}

    def is_requested(self, step: int, digest: str) -> bool:
        """Return whether a checkpoint remains to be scored on a dataset that was requested for it."""
        return (step, digest) in self._requested and bool(self.remaining(step, digest))

    def score(
        self, step: int, digest: str, dataset: EvaluationDataset, *, scoring_digest: str | None = None
    ) -> EvaluationRecord | None:
        """Return the newest score of a checkpoint on a dataset (that was scored in this way), or None."""
        return self._ledger.find(
            step=step,
            checkpoint_digest=digest,
            dataset=dataset.name,
            dataset_digest=dataset.digest,
            outcome=EvaluationOutcome.SCORED,
            scoring_digest=scoring_digest,
        )

    def record_score(
        self,
        digest: str,
        dataset: EvaluationDataset,
        result: EvaluationResult,
        *,
        duration_seconds: float,
        metric_digest: str = "",
        scoring_digest: str = "",
        tables: Mapping[str, Any] | None = None,
    ) -> EvaluationRecord:
        """Record a score, with a note if it is the first on a new content of the dataset.

        Args:
            digest: The digest of the checkpoint.
            dataset: The dataset.
            result: The score.
            duration_seconds: How long it took.
            metric_digest: Identifies the configuration of the metrics.
            scoring_digest: Identifies the way of scoring.
            tables: Its tables, to be recorded with it.

        Raises:
            LedgerError: The ledger cannot be written.
        """
        entry = entry_of(result, digest, dataset, duration_seconds=duration_seconds, metric_digest=metric_digest)
        return self._record(
            replace(entry, notes=(*entry.notes, *self._change_of(dataset))),
            scoring_digest=scoring_digest,
            resampled=result.resampled,
            tables=tables,
        )

    def record_reason(
        self,
        step: int,
        digest: str,
        outcome: EvaluationOutcome,
        reason: str,
        *,
        dataset: EvaluationDataset | None = None,
    ) -> EvaluationRecord:
        """Record why a checkpoint has no score on a dataset, or on any if none is given.

        Raises:
            LedgerError: The ledger cannot be written.
        """
        name, content = (dataset.name, dataset.digest) if dataset else (WHOLE_CHECKPOINT, "")
        return self._record(
            EvaluationRecord(
                step=step,
                checkpoint_digest=digest,
                dataset=name,
                dataset_digest=content,
                outcome=outcome,
                reason=reason,
            )
        )

    def record_decision(
        self,
        step: int,
        digest: str,
        outcome: EvaluationOutcome,
        reason: str,
        *,
        dataset: str,
        dataset_digest: str,
        metrics: Mapping[str, float],
        conditions: Sequence[GateCondition],
        decided_on: str,
    ) -> EvaluationRecord:
        """Record a gate's decision, which is the same entry if it was made on the same scores.

        Raises:
            LedgerError: The ledger cannot be written.
        """
        return self._record(
            EvaluationRecord(
                step=step,
                checkpoint_digest=digest,
                dataset=dataset,
                dataset_digest=dataset_digest,
                outcome=outcome,
                reason=reason,
                metrics=metrics,
                conditions=tuple(conditions),
            ),
            scoring_digest=decided_on,
        )

    def record_rollout(
        self,
        step: int,
        digest: str,
        outcome: EvaluationOutcome,
        reason: str,
        *,
        rollout: str,
        metrics: Mapping[str, float],
        notes: Sequence[str],
    ) -> EvaluationRecord:
        """Record a step of a rollout, which is the same entry if it was recorded before.

        Args:
            step: The step of the checkpoint.
            digest: Its digest.
            outcome: What happened.
            reason: Why.
            rollout: Identifies the rollout.
            metrics: The numbers that it was decided on.
            notes: The servers that it is about.

        Raises:
            LedgerError: The ledger cannot be written.
        """
        return self._record(
            EvaluationRecord(
                step=step,
                checkpoint_digest=digest,
                dataset=WHOLE_CHECKPOINT,
                dataset_digest=ROLLOUT_CONTENT,
                outcome=outcome,
                reason=reason,
                metrics=metrics,
                notes=tuple(notes),
            ),
            scoring_digest=rollout,
        )

    def _change_of(self, dataset: EvaluationDataset) -> tuple[str, ...]:
        """Return a note if the newest score of a dataset is on other content."""
        content, sequence = self._contents.get(dataset.name, (dataset.digest, 0))
        if content == dataset.digest:
            return ()
        changed = f"the content of dataset {dataset.name!r} has changed"
        return (
            f"{changed}: entries up to {sequence} were scored on other examples, and are not compared with later ones",
        )

    def _record(
        self,
        entry: EvaluationRecord,
        *,
        scoring_digest: str = "",
        resampled: Arrays | None = None,
        tables: Mapping[str, Any] | None = None,
    ) -> EvaluationRecord:
        """Append an entry, write its tables if there are any, and notify those that follow the ledger."""
        with self._lock:
            before = self._ledger.last_sequence
            record = self._ledger.append(entry, scoring_digest=scoring_digest, resampled=resampled)
            if tables is not None:
                self._write_tables(record, tables)
            self._recorded.add((record.step, record.checkpoint_digest, record.dataset, entry.dataset_digest))
            self.changes.note(record.step)
            if record.outcome is EvaluationOutcome.SCORED:
                self._contents[record.dataset] = (record.dataset_digest, record.sequence)
            self._notify(record, new=record.sequence > before)
        return record

    def resampled(self, record: EvaluationRecord) -> Arrays:
        """Return the values of the metrics in each resample; see `Ledger.resampled`.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        return self._ledger.resampled(record.sequence)

    def steps(self) -> list[int]:
        """Return the steps with a record, ascending.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        return self._ledger.steps()

    def remove_old(self, protected: Callable[[], Collection[int]]) -> None:
        """Remove the oldest entries of the ledger beyond the number to keep, if there are new ones. For one thread.

        Their tables are removed, too. Result files and summaries stay.

        Args:
            protected: Returns the steps whose entries stay. Called only if entries may be removed.

        Raises:
            LedgerError: The ledger cannot be written.
        """
        newest = self._ledger.last_sequence
        if self._keep is None or newest - self._removed_up_to < max(1, self._keep // _REMOVALS):
            return
        removed = self._ledger.remove_oldest(keep=self._keep, protected=protected())
        self._removed_up_to = newest
        if removed:
            _log.info("%d old evaluations removed from the ledger", removed)
            self._remove_old_tables()

    def start_recovering(self) -> None:
        """Write what `recover` writes on a thread, which `close` ends."""
        self._warn_of_changes()
        self._recovery.start()

    def recover(self) -> None:
        """Write the result files and summaries that are missing after a crash or a full disk, until `close`.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        self._warn_of_changes()
        self._recovery.run()

    def _warn_of_changes(self) -> None:
        for note in itertools.chain.from_iterable(map(self._change_of, self.datasets)):
            _log.warning("%s", note)

    def close(self) -> None:
        """End the recovery and close the summaries; the owner of the ledger closes the ledger. Idempotent."""
        self._recovery.close()
        with self._lock:
            self._summaries.close()

    def _write_tables(self, record: EvaluationRecord, tables: Mapping[str, Any]) -> None:
        if self._tables is None:
            return
        try:
            self._tables.write(record.sequence, tables)
        except OSError:
            _log.exception("tables not written", extra={"step": record.step, "dataset": record.dataset})

    def _remove_old_tables(self) -> None:
        if self._tables is None:
            return
        try:
            self._tables.remove_all_but(self._has_entry)
        except OSError:
            _log.exception("tables of old evaluations not removed")

    def _has_entry(self, sequence: int) -> bool:
        found = self._ledger.page(after_sequence=sequence - 1, limit=1)
        return bool(found) and found[0].sequence == sequence

    def _notify(self, record: EvaluationRecord, *, new: bool) -> None:
        if not new:
            return
        self._listener(record)
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
        self._on_written(record)
        self._observer.evaluation_recorded(record)

    def _summarize(self, record: EvaluationRecord) -> None:
        try:
            self._summaries.write(record)
        except OSError:
            _log.exception("summary not written", extra={"step": record.step, "dataset": record.dataset})

    def _publish(self, step: int) -> None:
        records = self._ledger.of_step(step)
        if not records:  # they were removed meanwhile
            return
        settled = not self.remaining(step, records[-1].checkpoint_digest)
        try:
            self._results.publish(step, records, settled=settled)
        except OSError:
            _log.exception("result file not written", extra={"step": step})
