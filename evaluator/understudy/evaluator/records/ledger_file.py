"""The ledger's file: its tables, the versions of its schema, and how it is opened on which file system."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import psutil

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.types import WHOLE_CHECKPOINT, EvaluationOutcome

_log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
"""The file in the state folder."""

APPLICATION_ID = 0x55535459
"""Identifies the file as a ledger: ``USTY``."""

SCHEMA_VERSION = 4

SUPERSEDED = "superseded-"
"""The prefix of the dataset digest in entries that no longer settle a checkpoint."""

_TRIED_AGAIN = (
    "%differs from the % in its architecture%",  # recorded by versions that served only one architecture
    "%have no memory left for step%",
    "%are not those of the experiment's model%",
)
"""Reasons of failures that the evaluator caused rather than the checkpoint: another evaluator may succeed."""

_TABLE = """
CREATE TABLE {name} (
    sequence INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    checkpoint_digest TEXT NOT NULL,
    dataset TEXT NOT NULL,
    dataset_digest TEXT NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,
    metrics TEXT NOT NULL,
    examples INTEGER NOT NULL,
    duration_seconds REAL NOT NULL,
    recorded_at REAL NOT NULL,
    notes TEXT NOT NULL,
    details TEXT NOT NULL DEFAULT '{{}}',
    scoring_digest TEXT NOT NULL DEFAULT '',
    UNIQUE (checkpoint_digest, step, dataset, dataset_digest, outcome, scoring_digest)
) STRICT;
"""
_RESAMPLED = "CREATE TABLE resampled (sequence INTEGER PRIMARY KEY, content BLOB NOT NULL) STRICT;"
_INDEX = "CREATE INDEX evaluations_by_step ON evaluations (step);"

_EVENTS = """
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    type TEXT NOT NULL,
    step INTEGER NOT NULL,
    checkpoint_digest TEXT NOT NULL,
    occurred_at REAL NOT NULL,
    data TEXT NOT NULL
) STRICT;
CREATE TABLE deliveries (
    destination TEXT NOT NULL,
    event INTEGER NOT NULL,
    step INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    first_attempt_at REAL,
    due_at REAL NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '',
    dead_at REAL,
    PRIMARY KEY (destination, event)
) STRICT, WITHOUT ROWID;
CREATE INDEX deliveries_by_event ON deliveries (event);
CREATE INDEX deliveries_by_step ON deliveries (destination, step, event);
CREATE TABLE announced (
    step INTEGER NOT NULL,
    checkpoint_digest TEXT NOT NULL,
    what TEXT NOT NULL,
    PRIMARY KEY (step, checkpoint_digest, what)
) STRICT, WITHOUT ROWID;
CREATE TABLE last_served (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    step INTEGER NOT NULL,
    checkpoint_digest TEXT NOT NULL,
    created_at REAL NOT NULL
) STRICT;
"""
"""The tables of events in the ledger's file, from schema version 3 on.

``deliveries`` has a row for each event and destination until it is delivered, ``announced`` what is not to become an
event again, and ``last_served`` what the last event about serving was about.
"""

_FIRST_SCORES = """
CREATE TABLE first_scores (
    dataset TEXT NOT NULL,
    metric TEXT NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (dataset, metric)
) STRICT, WITHOUT ROWID;
"""
"""The digest of each metric's first configuration, and with an empty metric of the dataset's first content."""

_SCHEMA = _TABLE.format(name="evaluations") + _INDEX + _RESAMPLED + _EVENTS + _FIRST_SCORES

_FIRST_COLUMNS = (
    "sequence, step, checkpoint_digest, dataset, dataset_digest, outcome, reason, metrics, examples, duration_seconds, "
    "recorded_at, notes"
)
_COPY = f"INSERT INTO evaluations_2 ({_FIRST_COLUMNS}) SELECT {_FIRST_COLUMNS} FROM evaluations;"  # noqa: S608 - constants
_RENAME = "DROP TABLE evaluations; ALTER TABLE evaluations_2 RENAME TO evaluations;"
_FROM_VERSION_1 = _TABLE.format(name="evaluations_2") + _COPY + _RENAME + _INDEX + _RESAMPLED
"""Makes the tables of version 1 those of version 2, whose identity of an entry has one more column."""

_FIND_FIRST_SCORES = """
INSERT INTO first_scores SELECT dataset, '', dataset_digest FROM (
    SELECT dataset, dataset_digest, MIN(sequence) FROM evaluations WHERE outcome = 'scored' GROUP BY dataset
);
INSERT INTO first_scores SELECT dataset, metric, digest FROM (
    SELECT dataset, digests.key AS metric, digests.value AS digest, MIN(sequence)
    FROM evaluations, json_each(details, '$.metric_digests') AS digests
    WHERE outcome = 'scored' AND digests.key != '' AND digests.value != '' GROUP BY dataset, digests.key
);
"""

_UPGRADES = {1: _FROM_VERSION_1, 2: _EVENTS, 3: _FIRST_SCORES + _FIND_FIRST_SCORES}
"""What makes the tables of a version those of the next one."""


def open_ledger_file(path: Path, file_system: str) -> sqlite3.Connection:
    """Open a ledger, for any thread; create it if it is missing, and bring its tables up to the newest version.

    Failures that an earlier evaluator caused are superseded.

    Args:
        path: The file.
        file_system: The type of the file system that holds it. On a network file system, which may lack the shared
            memory that a write-ahead log needs, the file has a rollback journal.

    Raises:
        LedgerError: The file is not a ledger, has another schema version, is damaged, or cannot be opened.
    """
    with contextlib.ExitStack() as undo, reporting(path):
        connection = sqlite3.connect(path, check_same_thread=False)
        undo.callback(connection.close)
        if is_remote(file_system):
            # A ledger that has a write-ahead log is then read without shared memory.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        version = _version_of(connection, path)
        _set_journal(connection, path, file_system)
        connection.execute("PRAGMA synchronous = FULL")
        if version is None:
            _create(connection)
        else:
            _upgrade(connection, path, version)
            _supersede_failures(connection)
        undo.pop_all()
    return connection


@contextlib.contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as LedgerError."""
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(
            f"the ledger {path} cannot be used: {error}; check the disk's space and the file's permissions, or move "
            "the file away to begin a new ledger"
        ) from error


def _version_of(connection: sqlite3.Connection, path: Path) -> int | None:
    """Return the schema version of a file, None if it is empty; raise LedgerError if it is not a ledger to be read."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if (application, version, tables) == (0, 0, 0):
        return None
    if application != APPLICATION_ID:
        raise LedgerError(f"{path} is not a ledger of evaluations; move it away or choose another state folder")
    if not 1 <= version <= SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has schema version {version}, this program reads up to {SCHEMA_VERSION}; use the version of "
            "understudy that wrote it, or move the file away to begin a new ledger"
        )
    return int(version)


def _set_journal(connection: sqlite3.Connection, path: Path, file_system: str) -> None:
    if not is_remote(file_system):
        connection.execute("PRAGMA journal_mode = WAL")
        return
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA locking_mode = NORMAL")
    _log.info(
        "the ledger %s is on a network file system (%s), so it has a rollback journal instead of a write-ahead "
        "log; give a local folder with --state-dir if entries are slow to write",
        path,
        file_system,
    )


def _create(connection: sqlite3.Connection) -> None:
    connection.executescript(
        f"BEGIN; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def _upgrade(connection: sqlite3.Connection, path: Path, version: int) -> None:
    for older in range(version, SCHEMA_VERSION):
        script = f"{_UPGRADES[older]} PRAGMA user_version = {older + 1};"
        connection.executescript(f"BEGIN IMMEDIATE; {script} COMMIT;")
        _log.info("the ledger %s now has schema version %d", path, older + 1)


def _supersede_failures(connection: sqlite3.Connection) -> None:
    """Have checkpoints tried again whose failures an earlier evaluator caused."""
    with connection:
        connection.executemany(
            "UPDATE evaluations SET dataset_digest = ? || sequence WHERE dataset = ? AND dataset_digest = '' "
            "AND outcome = ? AND reason LIKE ?",
            [(SUPERSEDED, WHOLE_CHECKPOINT, EvaluationOutcome.FAILED.value, like) for like in _TRIED_AGAIN],
        )


_NETWORK = frozenset(
    {
        "9p",
        "afpfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "pvfs2",
        "smb3",
        "smbfs",
        "webdav",
    }
)
_FUSE = "fuse."
"""The prefix of file systems that a program implements, such as ``fuse.sshfs`` and ``fuse.gcsfuse``."""


class Mount(Protocol):
    """A mounted file system."""

    @property
    def mountpoint(self) -> str:
        """The absolute path of its root."""

    @property
    def fstype(self) -> str:
        """Its type, as ``/proc/mounts`` names it."""


def mounted_type(path: Path) -> str:
    """Return the type of the file system that holds an existing path, such as ``ext4``; empty if it is unknown.

    The list of mounts is read; the file system itself is not asked, because a lost server would block the call.
    """
    return type_among(path.resolve(), psutil.disk_partitions(all=True))


def type_among(path: Path, mounts: Iterable[Mount]) -> str:
    """Return the type of the innermost of these mounts that holds an absolute path; of equal ones, the last."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    innermost = max(reversed(holding), key=lambda mount: len(mount.mountpoint), default=None)
    return "" if innermost is None else innermost.fstype


def is_remote(file_system: str) -> bool:
    """Return whether a type of file system is on a network, or may be: a program implements it."""
    return file_system in _NETWORK or file_system.startswith(_FUSE)
