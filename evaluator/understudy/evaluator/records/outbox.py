"""The events that wait to be delivered, in tables of the ledger's file."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.checkpoints.atomic import write_bytes
from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.events import Event, EventType

_log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""How many events may wait for one destination."""

MOST_DEAD = 1_000
"""How many dead letters of one destination are kept."""

LONGEST_RETRY_SECONDS = 300.0
"""The longest pause between two attempts; one that is due later was computed by another clock."""

ID_FILE = "evaluator-id"
"""The file in the state folder that identifies it."""

_LIMIT_CHECKS = 100
"""The limit of what waits is checked when this fraction of it is new."""

_BUSY_SECONDS = 30.0
_MOST_ERROR_CHARACTERS = 500

_COLUMNS = (
    "e.sequence, e.id, e.type, e.step, e.checkpoint_digest, e.occurred_at, e.data, d.destination, d.attempts, "
    "d.first_attempt_at, d.due_at, d.error, d.dead_at"
)
_JOINED = "FROM deliveries AS d JOIN events AS e ON e.sequence = d.event"


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """Which events a destination receives.

    Attributes:
        destination: The name of the destination.
        types: The types of the events.
    """

    destination: str
    types: frozenset[EventType] = field(default_factory=lambda: frozenset(EventType))


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """An event on its way to one destination.

    Attributes:
        event: The event.
        destination: The name of the destination.
        sequence: The place of the event in the order of all.
        attempts: How many attempts failed.
        first_attempt_at: When the first attempt failed, in seconds since the epoch; None before.
        due_at: When the next attempt is due, in seconds since the epoch; 0 for now.
        error: Why the last attempt failed.
        dead_at: When it became a dead letter, in seconds since the epoch; None while it waits.
    """

    event: Event
    destination: str
    sequence: int
    attempts: int = 0
    first_attempt_at: float | None = None
    due_at: float = 0.0
    error: str = ""
    dead_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class DeliveryCounts:
    """How many events wait for a destination, and how many are dead letters."""

    waiting: int = 0
    dead: int = 0


class Outbox:
    """The events that wait for each destination. Thread-safe.

    The ledger puts an event here in the transaction of the entry that it is about, so neither is there without the
    other. An event stays until it is delivered, also over a crash, so it is delivered at least once; with the same id
    each time. To each destination, the events of a checkpoint go in their order: the next one waits for the one before,
    unless that one is a dead letter.

    Events beyond `MOST_WAITING` of a destination (give or take a hundredth), and dead letters beyond `MOST_DEAD`, are
    dropped, the oldest first, and counted.

    Args:
        path: The ledger's file, which has to exist when anything but `put` is called.
        subscriptions: The destinations of new events.
        clock: Returns the time in seconds since the epoch.
        most_waiting: How many events may wait for one destination.
        most_dead: How many dead letters of one destination are kept.
    """

    def __init__(
        self,
        path: Path,
        subscriptions: Sequence[Subscription] = (),
        *,
        clock: Callable[[], float] = time.time,
        most_waiting: int = MOST_WAITING,
        most_dead: int = MOST_DEAD,
    ) -> None:
        self._path = path
        self.subscriptions = tuple(subscriptions)
        self._clock = clock
        self._most_waiting = most_waiting
        self._most_dead = most_dead
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._changed = threading.Condition()
        self._puts = 0
        self._unchecked = 0
        self._closed = False
        self._dropped: dict[str, int] = {}

    def put(self, connection: sqlite3.Connection, event: Event) -> None:
        """Add an event for each destination that receives its type, in the transaction of a connection.

        Call `wake` once that is committed.
        """
        destinations = [each.destination for each in self.subscriptions if event.type in each.types]
        if not destinations:
            return
        sequence = connection.execute(
            "INSERT INTO events (id, type, step, checkpoint_digest, occurred_at, data) VALUES (?, ?, ?, ?, ?, ?)",
            (
                event.id,
                event.type.value,
                event.step,
                event.checkpoint_digest,
                event.occurred_at,
                json.dumps(event.data, allow_nan=False, separators=(",", ":")),
            ),
        ).lastrowid
        for destination in destinations:
            connection.execute(
                "INSERT INTO deliveries (destination, event, step) VALUES (?, ?, ?)",
                (destination, sequence, event.step),
            )
        self._unchecked += 1
        if self._unchecked >= self._most_waiting // _LIMIT_CHECKS:  # a check reads all that wait
            self._unchecked = 0
            for each in self.subscriptions:
                self._drop_beyond(connection, each.destination, dead=False, most=self._most_waiting)

    def wake(self) -> None:
        """Wake the threads that `wait`."""
        with self._changed:
            self._puts += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_seconds: float) -> int:
        """Wait for new events; return a number for the next call, which is ``seen`` if there are none. 0 at first."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._puts != seen, timeout_seconds)
            return self._puts

    def next(self, destination: str) -> Delivery | None:
        """Return the oldest event that is due for a destination, or None.

        Raises:
            LedgerError: The file cannot be read.
        """
        now = self._clock()
        found = self._select(
            "d.destination = ? AND d.dead_at IS NULL AND (d.due_at <= ? OR d.due_at > ?) AND NOT EXISTS (SELECT 1 FROM "
            "deliveries AS before WHERE before.destination = d.destination AND before.step = d.step AND before.event < "
            "d.event AND before.dead_at IS NULL) ORDER BY d.event LIMIT 1",
            (destination, now, now + 2 * LONGEST_RETRY_SECONDS),
        )
        return found[0] if found else None

    def delivered(self, delivery: Delivery) -> None:
        """Remove what was delivered.

        Raises:
            LedgerError: The file cannot be written. The event will be delivered again.
        """
        self._remove("destination = ? AND event = ?", (delivery.destination, delivery.sequence))

    def failed(self, delivery: Delivery, error: str, *, retry_after_seconds: float | None) -> None:
        """Record that an attempt failed.

        Args:
            delivery: What could not be delivered.
            error: Why.
            retry_after_seconds: When to try again; None to make it a dead letter.

        Raises:
            LedgerError: The file cannot be written. The event is due at once.
        """
        now = self._clock()
        with self._transaction() as connection:
            connection.execute(
                "UPDATE deliveries SET attempts = attempts + 1, first_attempt_at = COALESCE(first_attempt_at, ?), "
                "due_at = ?, error = ?, dead_at = ? WHERE destination = ? AND event = ?",
                (
                    now,
                    now + (retry_after_seconds or 0.0),
                    error[:_MOST_ERROR_CHARACTERS],
                    None if retry_after_seconds is not None else now,
                    delivery.destination,
                    delivery.sequence,
                ),
            )
            if retry_after_seconds is None:
                self._drop_beyond(connection, delivery.destination, dead=True, most=self._most_dead)

    def entries(
        self, *, destination: str | None = None, dead: bool | None = None, after_sequence: int = 0, limit: int = 100
    ) -> list[Delivery]:
        """Return up to ``limit`` events that wait (``dead=False``), are dead letters (True), or both, the oldest first.

        Raises:
            LedgerError: The file cannot be read.
        """
        return self._select(
            "e.sequence > ? AND d.destination = COALESCE(?, d.destination) AND (d.dead_at IS NOT NULL) = "
            "COALESCE(?, d.dead_at IS NOT NULL) ORDER BY e.sequence, d.destination LIMIT ?",
            (after_sequence, destination, dead, limit),
        )

    def counts(self) -> dict[str, DeliveryCounts]:
        """Return how many events wait for each destination, and how many are dead letters.

        Raises:
            LedgerError: The file cannot be read.
        """
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT destination, SUM(dead_at IS NULL), SUM(dead_at IS NOT NULL) FROM deliveries "
                "GROUP BY destination"
            ).fetchall()
        found = {name: DeliveryCounts(waiting=waiting, dead=dead) for name, waiting, dead in rows}
        return {each.destination: DeliveryCounts() for each in self.subscriptions} | found

    def dropped(self) -> Mapping[str, int]:
        """Return how many events of each destination were dropped since this object was made."""
        return dict(self._dropped)

    def resend(self, *, ids: Collection[str] = (), destination: str | None = None) -> int:
        """Make dead letters due again, all or those of these events, and of one destination; return how many.

        Raises:
            LedgerError: The file cannot be written.
        """
        condition, values = _chosen(ids, destination)
        with self._transaction() as connection:
            count = connection.execute(
                "UPDATE deliveries SET attempts = 0, first_attempt_at = NULL, due_at = 0, dead_at = NULL "  # noqa: S608 - constant texts
                f"WHERE dead_at IS NOT NULL AND {condition}",
                values,
            ).rowcount
        self.wake()
        return count

    def drop(self, *, ids: Collection[str] = (), destination: str | None = None, waiting: bool = False) -> int:
        """Remove dead letters, and with ``waiting`` the events that wait, too; choose as in `resend`.

        Raises:
            LedgerError: The file cannot be written.
        """
        condition, values = _chosen(ids, destination)
        return self._remove(f"{condition} AND (? OR dead_at IS NOT NULL)", (*values, waiting))

    def close(self) -> None:
        """Close the file and wake the waiting threads. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _remove(self, condition: str, values: Sequence[Any]) -> int:
        with self._transaction() as connection:
            return len(_removed(connection, condition, values))

    def _drop_beyond(self, connection: sqlite3.Connection, destination: str, *, dead: bool, most: int) -> None:
        """Remove what is beyond the limit of a destination, the oldest first, and count it."""
        row = connection.execute(
            "SELECT event FROM deliveries WHERE destination = ? AND (dead_at IS NOT NULL) = ? ORDER BY event DESC "
            "LIMIT 1 OFFSET ?",
            (destination, dead, most),
        ).fetchone()
        if row is None:
            return
        dropped = _removed(
            connection, "destination = ? AND (dead_at IS NOT NULL) = ? AND event <= ?", (destination, dead, row[0])
        )
        self._dropped[destination] = self._dropped.get(destination, 0) + len(dropped)
        _log.warning(
            "events dropped: too many are undelivered",
            extra={"destination": destination, "dropped": len(dropped), "kept": most},
        )

    def _select(self, where: str, values: Sequence[Any]) -> list[Delivery]:
        with self._transaction() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} {_JOINED} WHERE {where}", values).fetchall()
        return [_delivery(row) for row in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise LedgerError(f"the events in {self._path} cannot be used: they are closed")
            try:
                if self._connection is None:
                    self._connection = sqlite3.connect(
                        f"{self._path.absolute().as_uri()}?mode=rw",
                        uri=True,
                        timeout=_BUSY_SECONDS,
                        check_same_thread=False,
                    )
                    self._connection.execute("PRAGMA synchronous = FULL")
                with self._connection:
                    yield self._connection
            except sqlite3.Error as error:
                raise LedgerError(
                    f"the events in {self._path} cannot be used: {error}; check the disk's space and the file's "
                    "permissions"
                ) from error


def evaluator_id(state_dir: Path) -> str:
    """Return the identifier of a state folder, which is made at the first call.

    Raises:
        OSError: It cannot be read or written.
    """
    file = state_dir / ID_FILE
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        identifier = uuid.uuid4().hex
        write_bytes(file, f"{identifier}\n".encode())
        return identifier


def _removed(connection: sqlite3.Connection, condition: str, values: Sequence[Any]) -> list[int]:
    """Remove deliveries, and the events that then have none; return the events of the deliveries."""
    found = connection.execute(f"DELETE FROM deliveries WHERE {condition} RETURNING event", values).fetchall()  # noqa: S608 - constant texts
    events = [sequence for (sequence,) in found]
    connection.executemany(
        "DELETE FROM events WHERE sequence = ?"
        " AND NOT EXISTS (SELECT 1 FROM deliveries WHERE deliveries.event = events.sequence)",
        [(sequence,) for sequence in set(events)],
    )
    return events


def _chosen(ids: Collection[str], destination: str | None) -> tuple[str, tuple[Any, ...]]:
    """Return a condition on deliveries: of these events if there are any, and of this destination if there is one."""
    marks = ", ".join("?" * len(ids))
    of_events = f"event IN (SELECT sequence FROM events WHERE id IN ({marks}))" if ids else "TRUE"  # noqa: S608 - constant texts
    return f"{of_events} AND destination = COALESCE(?, destination)", (*ids, destination)


def _delivery(row: Sequence[Any]) -> Delivery:
    sequence, event_id, event_type, step, digest, occurred_at, data, destination, *rest = row
    attempts, first_attempt_at, due_at, error, dead_at = rest
    event = Event(
        type=EventType(event_type),
        step=step,
        checkpoint_digest=digest,
        occurred_at=occurred_at,
        data=json.loads(data),
        id=event_id,
    )
    return Delivery(
        event=event,
        destination=destination,
        sequence=sequence,
        attempts=attempts,
        first_attempt_at=first_attempt_at,
        due_at=due_at,
        error=error,
        dead_at=dead_at,
    )
