"""When a checkpoint was committed, seen, verified, loaded, warmed up, served and replaced, beside the ledger."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from understudy.evaluator.types import CheckpointInfo, LifeEvent, LifeRecord

LIFE_FILE: Final = "life.sqlite"
MAX_RECORDS: Final = 100_000
"""How many records are kept: the newest."""
MAX_OF_STEP: Final = 1_000
"""How many records of one step `LifeLog.of_step` returns: the newest."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS life (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    checkpoint_digest TEXT NOT NULL,
    event TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS life_by_step ON life (step);
CREATE UNIQUE INDEX IF NOT EXISTS life_once ON life (checkpoint_digest, step, event)
    WHERE event IN ('committed', 'seen');
CREATE INDEX IF NOT EXISTS life_served ON life (number) WHERE event = 'served';
"""
_BUSY_SECONDS: Final = 1.0
_DAMAGED_SUFFIX: Final = ".damaged"

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class LifeLog:
    """A table of what happened to checkpoints and when, in an SQLite file. Thread-safe.

    Nothing depends on it but what is shown. So it is not flushed to the disk with each record: a power failure may
    lose the newest ones. A file that cannot be used is logged once and left as it is; a damaged one is moved aside.
    That a checkpoint was committed and seen is recorded once, everything else each time that it happens.

    Args:
        path: The file; created if missing. No other process uses it.
        clock: Returns the time of a record, in seconds since the Unix epoch.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._fails = False
        self._closed = False
        self._connection: sqlite3.Connection | None = None
        self._use(lambda _: None)

    def record(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """Record that something happened to a checkpoint just now."""
        self._insert([(info.step, info.digest, event.value, self._clock())])

    def record_seen(self, infos: Iterable[CheckpointInfo]) -> None:
        """Record that checkpoints were seen just now, and when they were committed; known ones do not change."""
        now = self._clock()
        self._insert(
            (info.step, info.digest, event.value, at)
            for info in infos
            for event, at in ((LifeEvent.COMMITTED, info.created_at), (LifeEvent.SEEN, now))
        )

    def of_step(self, step: int) -> list[LifeRecord]:
        """Return what happened to the checkpoints of one step, by ascending time; nothing if the file is unusable."""

        def read(connection: sqlite3.Connection) -> list[LifeRecord]:
            rows = connection.execute(
                "SELECT checkpoint_digest, event, at FROM life WHERE step = ? ORDER BY at DESC, number DESC LIMIT ?",
                (step, MAX_OF_STEP),
            )
            return [LifeRecord(checkpoint_digest=digest, event=LifeEvent(event), at=at) for digest, event, at in rows]

        return (self._use(read) or [])[::-1]

    def served_steps(self, limit: int) -> list[int]:
        """Return the steps that came to serve, in this order; only the newest, and nothing if the file is unusable."""

        def read(connection: sqlite3.Connection) -> list[int]:
            query = "SELECT step FROM life WHERE event = 'served' ORDER BY number DESC LIMIT ?"
            return [step for (step,) in connection.execute(query, (limit,))]

        return (self._use(read) or [])[::-1]

    def close(self) -> None:
        """Close the file. Idempotent; later records are left out."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()

    def _insert(self, rows: Iterable[tuple[int, str, str, float]]) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO life (step, checkpoint_digest, event, at) VALUES (?, ?, ?, ?)", rows
                )
                connection.execute(
                    "DELETE FROM life WHERE number <= (SELECT MAX(number) FROM life) - ?", (MAX_RECORDS,)
                )

        self._use(insert)

    def _use(self, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
        """Return what ``work`` returns; None if the file cannot be used, of which the first time in a row is logged."""
        with self._lock:
            if self._closed:
                return None
            try:
                if self._connection is None:
                    self._connection = self._open()
                result = work(self._connection)
            except (sqlite3.Error, OSError) as error:
                if not self._fails:
                    _log.warning("the lives of checkpoints are not recorded in %s: %s", self._path, error)
                self._fails = True
                return None
            self._fails = False
            return result

    def _open(self) -> sqlite3.Connection:
        try:
            return _opened(self._path)
        except sqlite3.OperationalError:
            raise  # the file may be well: it is locked, or the disk is full
        except sqlite3.DatabaseError as error:
            aside = self._path.with_name(self._path.name + _DAMAGED_SUFFIX)
            _log.warning("%s cannot be read (%s); it is moved to %s, and a new one begun", self._path, error, aside)
            with contextlib.suppress(FileNotFoundError):
                self._path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            return _opened(self._path)


def _opened(path: Path) -> sqlite3.Connection:
    with contextlib.ExitStack() as undo:
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
        undo.callback(connection.close)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # needs no shared memory, which network disks may lack
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        undo.pop_all()
    return connection
