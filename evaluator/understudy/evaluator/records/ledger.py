"""The durable record of the outcome of every checkpoint on every dataset."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.comparable_curves import ComparableCurves
from understudy.evaluator.records.entries import (
    COLUMNS,
    decode_resampled,
    encode_details,
    encode_metrics,
    encode_resampled,
    read_row,
)
from understudy.evaluator.records.events import Event, event_of
from understudy.evaluator.records.ledger_file import mounted_type, open_ledger_file, reporting
from understudy.evaluator.records.outbox import Outbox
from understudy.evaluator.types import Arrays, EvaluationOutcome, EvaluationRecord

_PIECE = 500
"""Entries that are removed in one transaction."""
_AFTER_ALL_STEPS = 2**63 - 1
_BUSY_SECONDS = 30.0
"""The longest wait for a transaction of the other connection."""


class Announcement(NamedTuple):
    """An event that is no entry of the ledger, and what about its checkpoint is announced once."""

    event: Event
    once: str


class LastServed(NamedTuple):
    """A checkpoint that serves; ``created_at`` is in seconds since the epoch."""

    step: int
    checkpoint_digest: str
    created_at: float


class Ledger:
    """A table of entries in an SQLite file. Thread-safe; for the one process that holds the state folder's lock.

    An entry is on disk when `append` returns. Entries with the same checkpoint, dataset, content of the dataset,
    outcome and way of scoring are the same entry. Opening the ledger supersedes failures that an earlier evaluator
    caused: they stay on record, but `find` ignores them, so that the checkpoint is tried again.

    A file of an older schema version becomes one of the newest when it is opened, and keeps every entry.

    The file has a write-ahead log, except on network file systems, which may lack the shared memory that one needs.

    Args:
        path: The file; created if missing.
        clock: Returns the time of an entry, in seconds since the Unix epoch.
        file_system_of: Returns the type of the file system that holds a folder.
        outbox: Receives an event for each new entry that has one, in the same transaction; None if there are none.

    Attributes:
        curves: Names the curves that the scores belong to, also if the first ones were removed.

    Raises:
        LedgerError: The file is not a ledger, has another schema version, is damaged, or cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        file_system_of: Callable[[Path], str] = mounted_type,
        outbox: Outbox | None = None,
    ) -> None:
        self._path = path
        self._outbox = outbox
        self._clock = clock
        self._lock = threading.Lock()
        self._connection = open_ledger_file(path, file_system_of(path.parent))
        self._inode = path.stat().st_ino
        with reporting(self._path):
            self._last_sequence = int(self._value("SELECT COALESCE(MAX(sequence), 0) FROM evaluations"))
            firsts = self._connection.execute("SELECT dataset, metric, digest FROM first_scores")
            self.curves = ComparableCurves({(dataset, metric): digest for dataset, metric, digest in firsts})

    def check_present(self) -> None:
        """Raise LedgerError if the file is no longer where it was opened: what is written would be lost."""
        try:
            is_present = self._path.stat().st_ino == self._inode
        except OSError:
            is_present = False
        if not is_present:
            raise LedgerError(
                f"the ledger {self._path} was deleted, moved or replaced while it was in use; nothing is decided or "
                "recorded until it is back, or until another training is there; to begin a new ledger for the same "
                "training, start this server again"
            )

    @property
    def has_no_file(self) -> bool:
        """Whether nothing is where the file was opened."""
        return not self._path.exists()

    @property
    def last_sequence(self) -> int:
        """The sequence number of the newest entry, 0 if there is none."""
        with self._lock:
            return self._last_sequence

    def append(
        self, entry: EvaluationRecord, *, scoring_digest: str = "", resampled: Arrays | None = None
    ) -> EvaluationRecord:
        """Write one entry durably; return it with its number and time, or the existing entry if it is the same.

        Args:
            entry: The entry; its number and time are not used.
            scoring_digest: Identifies the way of scoring: metrics, slices and resampling.
            resampled: The values for `resampled`.

        Raises:
            LedgerError: The file cannot be written, for example on a full disk. Nothing was written.
        """
        identity = (
            entry.checkpoint_digest,
            entry.step,
            entry.dataset,
            entry.dataset_digest,
            entry.outcome.value,
            scoring_digest,
        )
        content = (
            entry.reason,
            encode_metrics(entry.metrics),
            entry.examples,
            entry.duration_seconds,
            self._clock(),
            json.dumps(list(entry.notes)),
            encode_details(entry),
        )
        return self._write(identity, content, encode_resampled(resampled) if resampled else None)

    def _write(self, identity: Sequence[Any], content: Sequence[Any], values: bytes | None) -> EvaluationRecord:
        """Insert an entry and its resampled values, and add its event to the outbox, unless it is already there."""
        with self._writing():
            with self._connection:
                cursor = self._connection.execute(
                    "INSERT INTO evaluations (checkpoint_digest, step, dataset, dataset_digest, outcome, "
                    "scoring_digest, reason, metrics, examples, duration_seconds, recorded_at, notes, details) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (*identity, *content),
                )
                is_new, sequence = cursor.rowcount == 1, cursor.lastrowid
                if is_new and values is not None:
                    self._connection.execute("INSERT INTO resampled VALUES (?, ?)", (sequence, values))
                (record,) = self._select(
                    "checkpoint_digest = ? AND step = ? AND dataset = ? AND dataset_digest = ? AND outcome = ? AND "
                    "scoring_digest = ?",
                    identity,
                )
                is_score = is_new and record.outcome is EvaluationOutcome.SCORED
                firsts = self.curves.firsts_of(record) if is_score else {}
                self._connection.executemany(
                    "INSERT INTO first_scores VALUES (?, ?, ?)", [(*key, digest) for key, digest in firsts.items()]
                )
                names = self.curves.names(record) if is_score else {}
                event = event_of(record, names) if is_new and self._outbox is not None else None
                if event is not None and self._outbox is not None:
                    self._outbox.put(self._connection, event)
            if is_new:
                self._last_sequence = record.sequence
                self.curves.add(firsts)
            if event is not None and self._outbox is not None:
                self._outbox.wake()
            return record

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Add events that are no entries to the outbox, in one transaction, each unless it was announced before.

        Without an outbox, nothing is written.

        Raises:
            LedgerError: The file cannot be written. Nothing was written.
        """
        if self._outbox is None:
            return
        with self._writing():
            with self._connection:
                for event, once in announcements:
                    cursor = self._connection.execute(
                        "INSERT INTO announced VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                        (event.step, event.checkpoint_digest, once),
                    )
                    if cursor.rowcount == 1:
                        self._outbox.put(self._connection, event)
            self._outbox.wake()

    def announce_serving(self, event_after: Callable[[LastServed | None], Event], served: LastServed) -> None:
        """Add the event that a checkpoint serves to the outbox, unless the last such event was about it.

        Without an outbox, nothing is written.

        Args:
            event_after: Returns the event, given what the last one was about; None if there was none.
            served: The checkpoint.

        Raises:
            LedgerError: The file cannot be written. Nothing was written.
        """
        if self._outbox is None:
            return
        with self._writing():
            row = self._connection.execute("SELECT step, checkpoint_digest, created_at FROM last_served").fetchone()
            last = None if row is None else LastServed(*row)
            if last is not None and last[:2] == served[:2]:
                return
            with self._connection:
                self._connection.execute("INSERT OR REPLACE INTO last_served VALUES (1, ?, ?, ?)", served)
                self._outbox.put(self._connection, event_after(last))
            self._outbox.wake()

    def find(
        self,
        *,
        step: int,
        checkpoint_digest: str,
        dataset: str,
        dataset_digest: str = "",
        outcome: EvaluationOutcome | None = None,
        scoring_digest: str | None = None,
    ) -> EvaluationRecord | None:
        """Return the newest entry of this checkpoint, dataset and content (and outcome, and scoring), or None."""
        with self._using():
            records = self._select(
                "checkpoint_digest = ? AND step = ? AND dataset = ? AND dataset_digest = ? AND outcome = "
                "COALESCE(?, outcome) AND scoring_digest = COALESCE(?, scoring_digest) ORDER BY sequence DESC LIMIT 1",
                (
                    checkpoint_digest,
                    step,
                    dataset,
                    dataset_digest,
                    None if outcome is None else outcome.value,
                    scoring_digest,
                ),
            )
        return records[0] if records else None

    def page(
        self,
        *,
        after_sequence: int = 0,
        limit: int = 100,
        dataset: str | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        outcome: EvaluationOutcome | None = None,
    ) -> list[EvaluationRecord]:
        """Return up to ``limit`` entries after a sequence number that pass all given filters, in ascending order."""
        conditions: list[tuple[str, Any]] = [("sequence > ?", after_sequence)]
        filters: list[tuple[str, Any]] = [
            ("dataset = ?", dataset),
            ("step >= ?", min_step),
            ("step <= ?", max_step),
            ("outcome = ?", None if outcome is None else outcome.value),
        ]
        conditions += [(text, value) for text, value in filters if value is not None]
        where = " AND ".join(text for text, _ in conditions)
        with self._using():
            return self._select(f"{where} ORDER BY sequence LIMIT ?", (*(value for _, value in conditions), limit))

    def of_step(self, step: int) -> list[EvaluationRecord]:
        """Return every entry of one step, by ascending sequence number."""
        with self._using():
            return self._select("step = ? ORDER BY sequence", (step,))

    def scored(self, dataset: str) -> list[EvaluationRecord]:
        """Return every score on one dataset, by ascending sequence number."""
        with self._using():
            return self._select(
                "dataset = ? AND outcome = ? ORDER BY sequence", (dataset, EvaluationOutcome.SCORED.value)
            )

    def resampled(self, sequence: int) -> Arrays:
        """Return the values of the metrics in each resample, float32 ``[resamples]``, of one entry.

        Their names are ``metric`` and ``metric[slice]``. Entries without resamples have none. The draws depend only on
        the place of an example in its dataset, so the values of two entries on the same content of a dataset, with the
        same number of resamples, are pairs.
        """
        with self._using():
            row = self._connection.execute("SELECT content FROM resampled WHERE sequence = ?", (sequence,)).fetchone()
        return {} if row is None else decode_resampled(row[0])

    def identities(self) -> set[tuple[int, str, str, str]]:
        """Return the step, checkpoint digest, dataset and dataset digest of all entries."""
        with self._using():
            rows = self._connection.execute(
                "SELECT DISTINCT step, checkpoint_digest, dataset, dataset_digest FROM evaluations"
            )
            return {(int(step), digest, dataset, content) for step, digest, dataset, content in rows}

    def contents(self) -> dict[str, tuple[str, int]]:
        """Return the content of each dataset that was scored last, and the sequence number of that score."""
        with self._using():
            rows = self._connection.execute(
                "SELECT dataset, dataset_digest, MAX(sequence) FROM evaluations WHERE outcome = ? GROUP BY dataset",
                (EvaluationOutcome.SCORED.value,),
            )
            return {dataset: (content, int(sequence)) for dataset, content, sequence in rows}

    def steps(self) -> list[int]:
        """Return the steps that have an entry, ascending."""
        with self._using():
            rows = self._connection.execute("SELECT DISTINCT step FROM evaluations ORDER BY step").fetchall()
        return [int(step) for (step,) in rows]

    def newest_steps(self, *, before: int | None = None, limit: int) -> list[int]:
        """Return up to ``limit`` steps that have an entry, descending, all below ``before`` if it is given."""
        with self._using():
            rows = self._connection.execute(
                "SELECT DISTINCT step FROM evaluations WHERE step < ? ORDER BY step DESC LIMIT ?",
                (_AFTER_ALL_STEPS if before is None else before, limit),
            ).fetchall()
        return [int(step) for (step,) in rows]

    def remove_oldest(self, *, keep: int, protected: Collection[int]) -> int:
        """Remove the oldest entries and return how many. Blocks neither `append` nor `page` for more than one piece.

        Sequence numbers are never used again, so a page after a removed entry begins with the next one.

        Args:
            keep: How many of the newest entries to keep, at least 1.
            protected: The steps whose entries stay, in addition.

        Raises:
            LedgerError: The file cannot be written. What was removed before stays removed.
        """
        removed, after = 0, 0
        with (
            reporting(self._path),
            contextlib.closing(sqlite3.connect(self._path, timeout=_BUSY_SECONDS)) as connection,
        ):
            connection.execute("PRAGMA synchronous = FULL")
            row = connection.execute(
                "SELECT sequence FROM evaluations ORDER BY sequence DESC LIMIT 1 OFFSET ?", (keep,)
            ).fetchone()
            last = 0 if row is None else int(row[0])
            while piece := connection.execute(
                "SELECT sequence, step FROM evaluations WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?",
                (after, last, _PIECE),
            ).fetchall():
                after = int(piece[-1][0])
                removed += _remove(connection, piece, protected)
        return removed

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock, reporting(self._path):
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._using():
            self.check_present()
            yield

    def _select(self, where: str, values: Sequence[Any]) -> list[EvaluationRecord]:
        rows = self._connection.execute(f"SELECT {COLUMNS} FROM evaluations WHERE {where}", values)  # noqa: S608 - constant texts
        return [read_row(row) for row in rows]

    def _value(self, query: str) -> Any:
        return self._connection.execute(query).fetchone()[0]


def _remove(connection: sqlite3.Connection, entries: Sequence[tuple[int, int]], protected: Collection[int]) -> int:
    """Remove entries, by sequence number and step, but not those of protected steps; return how many."""
    old = [(sequence,) for sequence, step in entries if step not in protected]
    with connection:
        connection.executemany("DELETE FROM evaluations WHERE sequence = ?", old)
        connection.executemany("DELETE FROM resampled WHERE sequence = ?", old)
        connection.executemany(
            "DELETE FROM announced WHERE step = ?"
            " AND NOT EXISTS (SELECT 1 FROM evaluations WHERE evaluations.step = announced.step)",
            [(step,) for step in {step for _, step in entries} - set(protected)],
        )
    return len(old)
