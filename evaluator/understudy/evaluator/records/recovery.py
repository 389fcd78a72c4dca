"""Writes the result files and summaries that are missing after a crash or a full disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.result_files import ResultFiles
from understudy.evaluator.records.summaries import Point, Summaries
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

_log = logging.getLogger(__name__)

_PAGE = 1000


class Recovery:
    """Writes what the entries of earlier processes lack, while new entries are recorded.

    There may be a hundred thousand files to write, which takes minutes.

    Args:
        ledger: The entries; those that it has now are looked at.
        results: The result files.
        summaries: The summaries.
        publish: Writes the result file of a step.
        lock: Held while a file or summaries are written.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        results: ResultFiles,
        summaries: Summaries,
        publish: Callable[[int], None],
        lock: threading.Lock,
    ) -> None:
        self._ledger = ledger
        self._results = results
        self._summaries = summaries
        self._publish = publish
        self._lock = lock
        self._last = ledger.last_sequence
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Do what `run` does on a thread, which `close` ends."""
        self._thread = threading.Thread(target=self._run, name="understudy-recovery")
        self._thread.start()

    def run(self) -> None:
        """Write what is missing, until `close`.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        newest = self._ledger.page(after_sequence=self._last - 1, limit=1)
        written = self._results.steps()
        for step in self._ledger.steps():
            if self._closing:
                return
            if step not in written or (newest and newest[0].step == step):
                with self._lock:
                    self._publish(step)
        try:
            self._complete_summaries()
        except OSError:
            _log.exception("summaries not completed")

    def close(self) -> None:
        """End the thread after the file that it writes. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.run()
        except LedgerError:
            _log.exception("missing result files and summaries not written")

    def _complete_summaries(self) -> None:
        """Write the points that the event files lack; those of later entries are written anyway."""
        known: dict[str, set[Point]] = {}
        for records in self._scores():
            for run in {run for record in records for run in self._summaries.runs_of(record)} - known.keys():
                known[run] = self._summaries.points(run)
            if self._closing:
                return
            with self._lock:
                self._summaries.complete(records, known)

    def _scores(self) -> Iterator[list[EvaluationRecord]]:
        after = 0
        while page := self._ledger.page(after_sequence=after, limit=_PAGE, outcome=EvaluationOutcome.SCORED):
            yield [record for record in page if record.sequence <= self._last]
            after = page[-1].sequence
            if after >= self._last:
                return
