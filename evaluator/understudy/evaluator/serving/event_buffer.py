"""Collects what happens to checkpoints beside their entries in the ledger, and writes it to the outbox."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.events import Event, EventType, json_values
from understudy.evaluator.records.ledger import Announcement, LastServed, Ledger
from understudy.evaluator.serving.quarantine import Failure
from understudy.evaluator.types import CheckpointInfo

_log = logging.getLogger(__name__)

_MOST_HELD = 20_000
_PIECE = 1000
"""Events that are written in one transaction."""

_Write = Announcement | CheckpointInfo
"""An event, or a checkpoint that began to serve, with the time as its event."""


class EventBuffer:
    """Holds events until `flush` writes them, so that no thread that serves or loads waits for a disk. Thread-safe.

    What a killed process had not written becomes an event later: a checkpoint that was committed is found again, the
    serving version is compared with that of the last event, and a damaged checkpoint fails again.

    Args:
        ledger: Holds the outbox; None if there are no events.
        wake: Called when there is something to flush; must be quick and must not raise.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(
        self, ledger: Ledger | None, *, wake: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._ledger = ledger
        self._wake = wake
        self._clock = clock
        self._held: deque[tuple[_Write, float]] = deque()
        self._lost = 0
        self._lock = threading.Lock()
        self._known = {identity[:2] for identity in ledger.identities()} if ledger is not None else set()

    def committed(self, info: CheckpointInfo) -> None:
        """Add that a checkpoint was committed, unless the ledger had an entry of it when this object was made."""
        if self._ledger is None or info.key in self._known:
            return
        self._announce(info, EventType.COMMITTED, info.created_at, "committed", final=info.final)

    def quarantined(self, info: CheckpointInfo, failure: Failure) -> None:
        """Add that a checkpoint failed to load: once while it is tried again, and once when it is not any more."""
        if self._ledger is None:
            return
        once = "given up" if failure.given_up else "quarantined"
        details = {"reason": failure.reason, "attempts": failure.attempts, "given_up": failure.given_up}
        self._announce(info, EventType.QUARANTINED, self._clock(), once, **details)
        self._wake()

    def promoted(self, info: CheckpointInfo) -> None:
        """Add that a checkpoint serves: promoted, or rolled back if the one before was later, by its step and its time.

        A clock that differs does not make a rollback of a promotion, nor does a training that begins again.
        """
        if self._ledger is None:
            return
        self._hold(info, self._clock())
        self._wake()

    def flush(self) -> None:
        """Write what is held, in order. For one thread at a time.

        Raises:
            LedgerError: The ledger cannot be written. The next call repeats what was not written.
        """
        if self._ledger is None:
            return
        while self._held:
            with self._lock:
                piece = list(itertools.islice(self._held, _PIECE))
                lost, self._lost = self._lost, 0
            if lost:
                _log.warning("events lost: too many wait for the ledger", extra={"lost": lost, "kept": _MOST_HELD})
            first, at = piece[0]
            if isinstance(first, CheckpointInfo):
                served = LastServed(first.step, first.digest, first.created_at)
                self._ledger.announce_serving(partial(_serving_event, served, at), served)
                written = 1
            else:
                run = [each for each, _ in itertools.takewhile(lambda held: isinstance(held[0], Announcement), piece)]
                self._ledger.announce([each for each in run if isinstance(each, Announcement)])
                written = len(run)
            with self._lock:
                for _ in range(written):
                    self._held.popleft()

    def close(self) -> None:
        """Write what is held, or log why that cannot be done."""
        try:
            self.flush()
        except LedgerError:
            _log.exception("events not written; those of checkpoints that exist follow after the next start")

    def _announce(self, info: CheckpointInfo, kind: EventType, at: float, once: str, **details: object) -> None:
        event = Event(
            type=kind,
            step=info.step,
            checkpoint_digest=info.digest,
            occurred_at=at,
            data=json_values({"created_at": info.created_at, **details}),
        )
        self._hold(Announcement(event, once), at)

    def _hold(self, write: _Write, at: float) -> None:
        with self._lock:
            if len(self._held) < _MOST_HELD:
                self._held.append((write, at))
            else:
                self._lost += 1


def _serving_event(served: LastServed, at: float, last: LastServed | None) -> Event:
    is_older = last is not None and served.step < last.step and served.created_at < last.created_at
    return Event(
        type=EventType.ROLLED_BACK if is_older else EventType.PROMOTED,
        step=served.step,
        checkpoint_digest=served.checkpoint_digest,
        occurred_at=at,
        data=json_values(
            {
                "created_at": served.created_at,
                "previous_step": None if last is None else last.step,
                "previous_digest": None if last is None else last.checkpoint_digest,
            }
        ),
    )
